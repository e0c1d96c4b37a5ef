//! The two sides in pid namespaces of their own, where they have no pid for each other (X28).

use rustix::process::{Signal, kill_process};

use crate::running::{Program, folder};

const PRODUCER: [&str; 4] = ["cpu-worker", "--channel=apart", "--ranks=1", "--wait-for-ranks"];
const WORKER: [&str; 4] = ["gpu-worker", "--channel=apart", "--ranks=1", "--rank=0"];

#[test]
fn x28_deaths_on_both_sides_of_a_pid_namespace_are_noticed_and_survived() {
    let folder = folder();
    let apart = || Program::start_in_pid_namespace(&folder, &WORKER);
    let Some(mut first) = apart() else { return };
    let mut producer = Program::start(&folder, &[&PRODUCER[..], &["--rounds=100000"]].concat(), "");
    first.until_it_says("verified role=0");
    producer.until_it_says("takes part");
    first.signal("itself", Signal::KILL);
    first.end();
    producer.until_it_says("RankLost: rank 0, pid");
    let mut second = apart().expect("as before");
    second.until_it_says("verified role=0");

    // The worker cannot see the producer's pid: it tells the one that stands in the lock.
    let pid = producer.id();
    producer.signal("itself", Signal::KILL);
    producer.end();
    second.until_it_says(&format!("ProducerLost: pid {pid}"));
    let next = Program::start(&folder, &[&PRODUCER[..], &["--requests=20"]].concat(), "");
    second.until_it_says("works for a new producer");
    let ended = next.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
    kill_process(second.inner(), Signal::TERM).expect("it lives");
    second.until_it_says("verified, 0 wrong");
    let ended = second.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    ended.left_nothing();
}

#[test]
fn x28_a_hung_worker_that_cannot_be_killed_from_here_is_named_and_keeps_its_rank() {
    let folder = folder();
    let args = [&PRODUCER[..], &["--rounds=100000", "--expel-after-ms=1500"]].concat();
    let Some(mut producer) = Program::start_in_pid_namespace(&folder, &args) else {
        return;
    };
    let mut worker = Program::start(&folder, &WORKER, "");
    worker.until_it_says("verified role=0");
    producer.until_it_says("takes part");
    worker.signal("itself", Signal::STOP);
    producer.until_it_says(&format!(
        "cannot kill rank-0 (pid {} of another pid namespace)",
        worker.id()
    ));
    // Nothing of it was freed: it goes on where it stopped.
    worker.signal("itself", Signal::CONT);
    worker.until_it_says("verified role=0");
    kill_process(producer.inner(), Signal::TERM).expect("it lives");
    let ended = producer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(!ended.log.contains("RankLost"), "{}", ended.log);
    assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
    worker.signal("itself", Signal::TERM);
    worker.until_it_says("verified, 0 wrong");
    worker.end().left_nothing();
}

#[test]
fn x28_doctor_reports_a_pid_namespace() {
    let Some(doctor) = Program::start_in_pid_namespace(&folder(), &["doctor", "--json"]) else {
        return;
    };
    let ended = doctor.end();
    let report = ended.report.expect("a report");
    let findings = report["findings"].as_array().expect("findings");
    let found = findings
        .iter()
        .find(|found| found["subject"] == "namespaces")
        .expect("a finding");
    assert_eq!(found["health"], "limited", "{found}");
    assert!(
        found["remedy"]
            .as_str()
            .is_some_and(|remedy| remedy.contains("pid namespace")),
        "{found}"
    );
}
