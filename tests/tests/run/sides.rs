//! The two sides started by hand: in any order, refused where they do not fit, replaced where they die.

use std::sync::Arc;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::running::{Ended, Program, folder};

fn producer(folder: &Arc<TempDir>, args: &[&str]) -> Program {
    let fixed = ["cpu-worker", "--channel=hand", "--ranks=1"];
    Program::start(folder, &[&fixed[..], args].concat(), "")
}

fn worker(folder: &Arc<TempDir>, args: &[&str]) -> Program {
    let fixed = ["gpu-worker", "--channel=hand", "--ranks=1", "--rank=0"];
    Program::start(folder, &[&fixed[..], args].concat(), "")
}

/// Stopped and drained, every byte right.
fn end_worker(mut worker: Program) -> Ended {
    worker.signal("itself", Signal::TERM);
    worker.until_it_says("verified, 0 wrong");
    let ended = worker.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    ended
}

#[test]
fn the_sides_find_each_other_in_either_order_and_the_last_one_removes_the_folder() {
    let folder = folder();
    for worker_first in [true, false] {
        let (early, producer, late) = if worker_first {
            let worker = worker(&folder, &[]);
            (Some(worker), producer(&folder, &["--requests=10"]), None)
        } else {
            let producer = producer(&folder, &["--requests=10"]);
            (None, producer, Some(worker(&folder, &[])))
        };
        let played = producer.end();
        assert_eq!(played.code, Some(0), "{}", played.log);
        assert!(played.log.contains("10 requests"), "{}", played.log);
        end_worker(early.or(late).unwrap()).left_nothing();
    }
}

#[test]
fn x20_a_second_producer_and_a_second_worker_are_refused_with_the_pid_of_the_first() {
    let folder = folder();
    let mut first = producer(&folder, &["--rounds=100000"]);
    let mut served = worker(&folder, &[]);
    first.until_it_says("rank 0 (pid");
    served.until_it_says("is attached");
    for (second, pid) in [
        (producer(&folder, &[]), first.id()),
        (worker(&folder, &[]), served.id()),
    ] {
        let refused = second.end();
        assert_eq!(refused.code, Some(4), "{}", refused.log);
        assert!(
            refused.log.contains(&format!("is pid {pid} already")),
            "{}",
            refused.log
        );
        assert!(refused.log.contains("stop it first"), "{}", refused.log);
    }
    first.signal("itself", Signal::TERM);
    let ended = first.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    end_worker(served);
}

#[test]
fn x20_a_worker_of_another_geometry_is_refused_on_both_sides_with_field_and_values() {
    let folder = folder();
    let mut first = producer(&folder, &[]);
    first.until_it_says("is open");
    let misfit = worker(&folder, &["--preset=sample-hybrid"]).end();
    assert_eq!(misfit.code, Some(4), "{}", misfit.log);
    first.until_it_says("does not fit");
    first.signal("itself", Signal::TERM);
    let ended = first.end();
    for log in [&misfit.log, &ended.log] {
        assert!(log.contains("dtype is F16, expected Bf16"), "{log}");
    }
}

#[test]
fn x24_a_new_worker_takes_the_place_of_a_killed_one() {
    let folder = folder();
    let mut producer = producer(&folder, &["--wait-for-ranks", "--rounds=100000"]);
    let mut first = worker(&folder, &[]);
    first.until_it_says("is attached");
    producer.until_it_says("rank 0 (pid");
    let pid = first.id();
    first.signal("itself", Signal::KILL);
    first.end();
    producer.until_it_says(&format!("RankLost: rank 0, pid {pid}"));
    let mut second = worker(&folder, &[]);
    producer.until_it_says(&format!("rank 0 (pid {}) takes part", second.id()));
    second.until_it_says("verified role=0");
    producer.signal("itself", Signal::TERM);
    let ended = producer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("0 blocks leaked"), "{}", ended.log);
    end_worker(second);
}

#[test]
fn x23_a_stopped_worker_is_alive_and_keeps_its_rank() {
    let folder = folder();
    let mut producer = producer(&folder, &["--wait-for-ranks", "--rounds=100000"]);
    let mut stopped = worker(&folder, &[]);
    stopped.until_it_says("verified role=0");
    producer.until_it_says("takes part");
    stopped.signal("itself", Signal::STOP);
    let second = worker(&folder, &[]).end();
    assert_eq!(second.code, Some(4), "{}", second.log);
    let said = format!("is pid {} already", stopped.id());
    assert!(second.log.contains(&said), "{}", second.log);
    stopped.signal("itself", Signal::CONT);
    producer.signal("itself", Signal::TERM);
    let ended = producer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(!ended.log.contains("RankLost"), "{}", ended.log);
    assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
    end_worker(stopped);
}

#[test]
fn x23_a_hung_worker_is_expelled_and_another_takes_its_place() {
    let folder = folder();
    let args = ["--wait-for-ranks", "--rounds=100000", "--expel-after-ms=1500"];
    let mut producer = producer(&folder, &args);
    let mut hung = worker(&folder, &[]);
    hung.until_it_says("verified role=0");
    producer.until_it_says("takes part");
    let pid = hung.id();
    hung.signal("itself", Signal::STOP);
    producer.until_it_says("a rank hangs and is killed");
    producer.until_it_says(&format!("RankLost: rank 0, pid {pid}"));
    assert_eq!(hung.end().code, None, "killed");
    let mut second = worker(&folder, &[]);
    second.until_it_says("verified role=0");
    producer.signal("itself", Signal::TERM);
    let ended = producer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
    end_worker(second);
}

#[test]
fn x25_a_new_producer_takes_over_from_a_killed_one_with_a_warm_pool() {
    let folder = folder();
    let mut first = producer(&folder, &["--rounds=100000"]);
    let mut worker = worker(&folder, &[]);
    worker.until_it_says("verified role=0");
    let pid = first.id();
    first.until_it_says("takes part");
    first.signal("itself", Signal::KILL);
    first.end();
    worker.until_it_says(&format!("ProducerLost: pid {pid}"));
    let second = producer(&folder, &["--requests=20"]);
    worker.until_it_says("works for a new producer");
    let ended = second.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(
        ended
            .log
            .contains("took the channel over as incarnation 2: workers [0] live"),
        "{}",
        ended.log
    );
    assert!(!ended.log.contains(" 0 blocks warm"), "{}", ended.log);
    end_worker(worker);
}

#[test]
fn x25_a_worker_that_a_cold_start_sends_away_attaches_anew() {
    let folder = folder();
    let mut first = producer(&folder, &["--hardened", "--rounds=100000"]);
    let mut worker = worker(&folder, &[]);
    worker.until_it_says("verified role=0");
    first.until_it_says("takes part");
    first.signal("itself", Signal::KILL);
    first.end();
    // Nobody can make a hardened channel writable again: the next producer starts cold.
    let second = producer(&folder, &["--hardened", "--requests=20"]);
    worker.until_it_says("attaches anew");
    worker.until_it_says("is attached");
    let ended = second.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("20 requests"), "{}", ended.log);
    end_worker(worker);
}

#[test]
fn x27_a_worker_whose_folder_was_deleted_says_so_and_attaches_anew() {
    let folder = folder();
    let channel = folder.path().join("hand");
    let mut first = producer(&folder, &["--rounds=100000"]);
    let mut worker = worker(&folder, &[]);
    worker.until_it_says("verified role=0");
    first.until_it_says("takes part");
    first.signal("itself", Signal::KILL);
    first.end();
    // One that serves nobody, and then one that waits to attach.
    for before in ["ProducerLost", "attaches anew"] {
        worker.until_it_says(before);
        worker.until_it_exists("hand/rank-0.sock");
        std::fs::remove_dir_all(&channel).expect("the folder is there");
    }
    worker.until_it_says("was deleted or replaced");
    let ended = producer(&folder, &["--requests=20"]).end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    end_worker(worker).left_nothing();
}

#[test]
fn x20_a_worker_of_another_user_takes_part_where_both_sides_allow_it_and_also_after_a_takeover() {
    const OTHER: u32 = 4711;
    let folder = folder();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
    let other = |args: &[&str]| {
        let fixed = ["gpu-worker", "--channel=hand", "--ranks=1", "--rank=0"];
        Program::start_as(OTHER, &folder, &[&fixed[..], args].concat())
    };
    let allow = format!("--allow-uid={OTHER}");
    let mut first = producer(&folder, &[&allow, "--rounds=100000"]);
    first.until_it_says("is open");
    let Some(unwilling) = other(&[]) else {
        first.signal("itself", Signal::TERM);
        return drop(first.end());
    };
    let refused = unwilling.end();
    assert_eq!(refused.code, Some(4), "{}", refused.log);
    assert!(
        refused.log.contains("or allow that user: --allow-uid"),
        "{}",
        refused.log
    );

    let mut worker = other(&["--allow-uid=0"]).unwrap();
    first.until_it_says("takes part");
    first.signal("itself", Signal::KILL);
    first.end();
    worker.until_it_says("ProducerLost");
    let played = producer(&folder, &[&allow, "--requests=10"]).end();
    assert_eq!(played.code, Some(0), "{}", played.log);
    assert!(played.log.contains("incarnation 2"), "{}", played.log);
    end_worker(worker);
    // The worker may not remove what is another user's.
    let clean = ["clean", "--allow-uid=4711"];
    let cleaned = Program::start(&folder, &clean, "").end();
    assert!(cleaned.log.contains("hand was stale"), "{}", cleaned.log);
    assert!(!folder.path().join("hand").exists());
}

#[test]
fn a_worker_that_is_stopped_while_no_producer_is_there_ends_with_code_0() {
    let folder = folder();
    let mut waiting = worker(&folder, &[]);
    waiting.until_it_exists("hand/rank-0.sock");
    waiting.signal("itself", Signal::TERM);
    let ended = waiting.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    ended.left_nothing();
}
