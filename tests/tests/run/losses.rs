//! `kvsluice run` when a process dies or somebody presses Ctrl-C: a clear message, no hang, nothing left behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::running::{Program, folder};

/// A run that would go on for minutes, in the middle of its work.
fn in_the_middle() -> Program {
    in_the_middle_in(&folder())
}

fn in_the_middle_in(folder: &Arc<TempDir>) -> Program {
    let mut run = Program::start(folder, &["run", "--json", "--rounds", "100000"], "");
    for rank in ["rank-0", "rank-1"] {
        run.until_it_says(&format!("verified role={rank}"));
    }
    run
}

#[test]
fn a_killed_worker_ends_the_run_with_its_rank_and_pid() {
    let run = in_the_middle();
    let pid = run.pid("rank-1");
    run.signal("rank-1", Signal::KILL);
    let ended = run.end();
    println!("ended {:?} after the kill", ended.took);
    ended.left_nothing();
    assert_eq!(ended.code, Some(3), "{}", ended.log);
    let said = format!("RankLost: rank 1, pid {pid}, killed by signal 9");
    assert!(ended.log.contains(&said), "{}", ended.log);
}

#[test]
fn a_killed_producer_ends_the_run_and_every_worker_says_so() {
    let run = in_the_middle();
    let pid = run.pid("producer");
    run.signal("producer", Signal::KILL);
    let ended = run.end();
    println!("ended {:?} after the kill", ended.took);
    ended.left_nothing();
    assert_eq!(ended.code, Some(3), "{}", ended.log);
    assert!(
        ended
            .log
            .contains(&format!("ProducerLost: pid {pid}, killed by signal 9")),
        "{}",
        ended.log
    );
    for rank in 0..2 {
        let said = format!("rank-{rank} says: ProducerLost: pid {pid}");
        assert!(ended.log.contains(&said), "no {said:?} in {}", ended.log);
    }
}

#[test]
fn ctrl_c_drains_and_leaves_nothing_behind() {
    let run = in_the_middle();
    run.signal("itself", Signal::INT);
    let ended = run.end();
    ended.left_nothing();
    assert_eq!(ended.code, Some(130), "{}", ended.log);
    assert!(ended.log.contains("draining"), "{}", ended.log);
    assert_eq!(ended.number("/mismatched_bytes"), 0);
    assert_eq!(ended.number("/leaked_blocks"), 0);
}

#[test]
fn the_second_ctrl_c_kills() {
    let mut run = in_the_middle();
    // A worker that is stopped never drains.
    run.signal("rank-0", Signal::STOP);
    run.signal("itself", Signal::INT);
    run.until_it_says("draining");
    run.signal("itself", Signal::INT);
    let ended = run.end();
    ended.left_nothing();
    assert_eq!(ended.code, Some(130), "{}", ended.log);
}

#[test]
fn x23_a_worker_that_hangs_is_expelled_and_named() {
    let mut run = Program::run(&["--rounds=100000", "--expel-after-ms=1500"], "");
    run.until_it_says("verified role=rank-1");
    let pid = run.pid("rank-1");
    run.signal("rank-1", Signal::STOP);
    let ended = run.end();
    ended.left_nothing();
    assert_eq!(ended.code, Some(3), "{}", ended.log);
    assert!(ended.log.contains("a rank hangs and is killed"), "{}", ended.log);
    assert!(
        ended.log.contains(&format!("RankLost: rank 1, pid {pid}")),
        "{}",
        ended.log
    );
}

#[test]
fn x27_a_killed_run_takes_its_processes_with_it_and_clean_removes_its_files() {
    let folder = folder();
    let run = in_the_middle_in(&folder);
    let channel = format!("run-{}", run.id());
    let early = Program::start(&folder, &["clean"], "").end();
    assert!(
        early
            .log
            .contains(&format!("{channel} is live: producer is pid {}", run.pid("producer"))),
        "{}",
        early.log
    );
    run.signal("itself", Signal::KILL);
    let ended = run.end();
    assert!(ended.alive.is_empty(), "{:?}", ended.alive);
    assert_eq!(
        ended.left,
        [folder.path().join(&channel)],
        "only locks and sockets stay"
    );
    let clean = Program::start(&folder, &["clean"], "").end();
    assert!(clean.log.contains(&format!("{channel} was stale")), "{}", clean.log);
    clean.left_nothing();
}

#[test]
fn x27_a_channel_that_cannot_be_cleaned_keeps_no_other_from_being_cleaned() {
    let folder = folder();
    let (open, stale) = (folder.path().join("a-open"), folder.path().join("b-stale"));
    for channel in [&open, &stale] {
        fs::create_dir(channel).expect("a folder");
    }
    fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).expect("chmod");
    fs::set_permissions(&stale, PermissionsExt::from_mode(0o700)).expect("chmod");
    let clean = Program::start(&folder, &["clean"], "").end();
    assert_eq!(clean.code, Some(4), "{}", clean.log);
    assert!(
        clean.log.contains("a-open: mode is 0755, expected 0700"),
        "{}",
        clean.log
    );
    assert!(clean.log.contains("b-stale was stale"), "{}", clean.log);
    assert_eq!(clean.left, [open]);
}
