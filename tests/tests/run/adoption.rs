//! A producer that dies and a successor that goes on with what the devices hold (X25).

use std::fmt::Write;
use std::sync::Arc;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::running::{Ended, Program, folder};

/// More requests than are played, each of a dozen blocks of its own.
fn trace(folder: &TempDir) -> String {
    let mut lines = String::new();
    for request in 0..20_000_u64 {
        let hashes: Vec<u64> = (0..12).map(|block| request * 100 + block).collect();
        writeln!(
            lines,
            r#"{{"timestamp":0,"input_length":{},"output_length":1,"hash_ids":{hashes:?}}}"#,
            12 * 512
        )
        .unwrap();
    }
    let path = folder.path().join("trace.jsonl");
    std::fs::write(&path, lines).unwrap();
    format!("--trace={}", path.display())
}

/// Kills the producer of two ranks in the middle of its work, and has another take over. Returns how many requests it
/// went on with, and the workers' ends.
fn takeover(planted: &str) -> (u64, [Ended; 2]) {
    let (folder, traces) = (folder(), tempfile::tempdir().unwrap());
    let trace = trace(&traces);
    let start = |args: &[&str], planted: &str| {
        let fixed = ["--channel=adopt", "--ranks=2"];
        Program::start(&Arc::clone(&folder), &[args, &fixed].concat(), planted)
    };
    let producer = ["cpu-worker", &trace, "--rounds=6"];
    let mut first = start(&producer, "");
    let mut workers = ["--rank=0", "--rank=1"].map(|rank| start(&["gpu-worker", rank], ""));
    workers
        .iter_mut()
        .for_each(|worker| worker.until_it_says("verified role="));
    first.until_it_says("rank 1 (pid");
    first.signal("itself", Signal::KILL);
    let pid = first.id();
    first.end();
    for worker in &mut workers {
        worker.until_it_says(&format!("ProducerLost: pid {pid}"));
    }
    let mut second = start(&producer, planted);
    second.until_it_says("requests go on with what the devices hold");
    let wrong = if planted.is_empty() {
        "verified role="
    } else {
        "wrong bytes"
    };
    workers.iter_mut().for_each(|worker| worker.until_it_says(wrong));
    second.signal("itself", Signal::TERM);
    let ended = second.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
    let said = ended.log.split(" requests go on with").next().unwrap();
    let resumed = said.rsplit(' ').next().unwrap().parse().expect("a number");
    let ends = workers.map(|worker| {
        worker.signal("itself", Signal::TERM);
        worker.end()
    });
    (resumed, ends)
}

#[test]
fn x25_a_new_producer_goes_on_with_the_residency_that_all_ranks_hold_alike() {
    let (resumed, workers) = takeover("");
    println!("{resumed} requests were resumed");
    assert!(resumed > 0);
    for worker in workers {
        assert_eq!(worker.code, Some(0), "{}", worker.log);
        assert!(worker.log.contains("verified, 0 wrong"), "{}", worker.log);
    }
}

#[test]
fn x25_slots_that_a_new_producer_mistakes_show_as_wrong_bytes() {
    let (_, workers) = takeover("x25_slots_are_mistaken");
    assert!(workers.iter().all(|worker| !worker.log.contains("verified, 0 wrong")));
}
