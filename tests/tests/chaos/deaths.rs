//! Processes that end themselves by SIGKILL at their k-th store to shared memory, in the middle of a copy, or at a named
//! point: what `transport/src/proof/crashes.rs` does at every store in one process, sampled on real ones.

use std::fmt::Write;

use crate::arena::{Ended, chaos};

/// Deaths of one side; the environment asks for more.
const DEATHS: u64 = 12;

/// Runs within which a planted fault must be found.
const ATTEMPTS: usize = 3;

fn asked(name: &str, default: u64) -> u64 {
    let asked = std::env::var(name).ok().and_then(|asked| asked.parse().ok());
    let value = asked.unwrap_or(default);
    println!("{name}={value}");
    value
}

/// Orders for the processes of `role`, one after another: every other one early in its life, where it makes, takes over
/// or attaches; the others in the middle of the work.
fn sample(role: &str) -> (String, u64) {
    let mut random = fastrand::Rng::with_seed(asked("KVSLUICE_SEED", 20_261_130));
    let deaths = asked("KVSLUICE_DEATHS", DEATHS);
    let mut orders = String::new();
    for death in 0..deaths {
        let bound = if death % 2 == 0 { 300 } else { 30_000 };
        let _ = write!(orders, "{role}@{} ", random.u64(..bound));
    }
    (orders, deaths)
}

fn die(orders: &str, args: &[&str], planted: &str) -> Ended {
    println!("KVSLUICE_DIE_AT={orders:?} KVSLUICE_PLANTED={planted:?}");
    // It ends with its last order; the time is for one that nobody comes to, on a machine as loaded as it may be.
    let fixed = ["--seconds=600", "--ranks=2"];
    let ended = chaos(&[&fixed[..], args].concat(), orders, planted);
    println!("{}", ended.report);
    ended
}

#[test]
fn x25_a_producer_that_dies_at_any_of_its_stores_leaves_what_the_next_one_needs() {
    let (orders, deaths) = sample("producer");
    let ended = die(&orders, &["--adversary=1"], "");
    ended.balances();
    assert_eq!(ended.kills(), deaths, "{ended:?}");
}

#[test]
fn x24_a_worker_that_dies_at_any_of_its_stores_is_replaced_and_nothing_is_lost() {
    let (orders, deaths) = sample("rank-0");
    let ended = die(&orders, &["--adversary=1"], "");
    ended.balances();
    assert_eq!(ended.kills(), deaths, "{ended:?}");
}

#[test]
fn x25a_a_death_in_the_middle_of_a_fill_a_takeover_or_an_attach_leaves_no_wrong_byte() {
    let orders = "producer@fill-invalid:20 rank-0@attached:0 producer@adopting:1 rank-1@copied:30 producer@joined:0 \
                  rank-1@handed-over:0 producer@fill-bytes:7 producer@fill-invalid:0 rank-0@copied:0 producer@adopting:0";
    let ended = die(orders, &["--adversary=1", "--source-blocks=64"], "");
    ended.balances();
    let points = ended.report["kills_by_point"].as_object().expect("an object");
    let named = |side: &str| points.keys().filter(|point| point.starts_with(side)).count();
    assert_eq!((named("producer:"), named("worker:")), (4, 3), "{points:?}");
    assert_eq!(ended.kills(), 10);
}

#[test]
fn x25_to_x25a_deaths_within_find_each_planted_fault_that_they_are_for() {
    let fills = "producer@fill-invalid:5 ".to_owned() + &"producer@fill-invalid:60 ".repeat(4);
    let cases: [(&str, String, &[&str]); 3] = [
        // An entry that is valid before its frame is filled, and a checksum that would have told. The next producer plays
        // the same round again and asks for that block first.
        ("x25a_valid_first,x25a_checksum_unread", fills, &["--source-blocks=64"]),
        // A record that can be read before it is whole; a terminal likewise.
        ("x10_commit_early", sample("producer").0, &[]),
        ("x12_commit_first", sample("rank-0").0, &[]),
    ];
    for (fault, orders, args) in cases {
        // Where a process is when the death comes is the scheduler's to say.
        let found = (0..ATTEMPTS).any(|_| !die(&orders, args, fault).is_sound());
        assert!(found, "{fault} was not found");
    }
}
