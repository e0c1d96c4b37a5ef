//! Named segments after the death of both sides (X26): found warm, made anew with a message, or refused.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::{Signal, getuid};
use tempfile::TempDir;

use crate::running::{Ended, Program, folder};

/// Where a segment's header has the boot id.
const BOOT_ID_AT: u64 = 32;

/// A persistent channel.
struct Channel {
    runtime: Arc<TempDir>,
    shm: TempDir,
}

impl Channel {
    fn new() -> Self {
        let shm = tempfile::Builder::new().prefix("kvsluice-run-").tempdir_in("/dev/shm");
        Self {
            runtime: folder(),
            shm: shm.expect("a folder on a tmpfs"),
        }
    }

    fn producer(&self, args: &[&str]) -> Program {
        let persist = format!("--persist={}", self.shm.path().display());
        let fixed = ["cpu-worker", "--channel=named", "--ranks=1", &persist];
        Program::start(&self.runtime, &[&fixed[..], args].concat(), "")
    }

    fn worker(&self) -> Program {
        let args = ["gpu-worker", "--channel=named", "--ranks=1", "--rank=0"];
        Program::start(&self.runtime, &args, "")
    }

    /// A pair in the middle of its work.
    fn at_work(&self) -> (Program, Program) {
        let (mut producer, mut worker) = (self.producer(&["--rounds=100000"]), self.worker());
        worker.until_it_says("verified role=0");
        producer.until_it_says("takes part");
        (producer, worker)
    }

    /// Both sides die.
    fn killed(&self) {
        let (producer, worker) = self.at_work();
        for side in [producer, worker] {
            side.signal("itself", Signal::KILL);
            side.end();
        }
    }

    /// The next pair plays to its end, and leaves nothing.
    fn next(&self) -> Ended {
        let (producer, mut worker) = (self.producer(&["--requests=20"]), self.worker());
        let ended = producer.end();
        assert_eq!(ended.code, Some(0), "{}", ended.log);
        assert!(ended.log.contains(" 0 blocks leaked"), "{}", ended.log);
        worker.signal("itself", Signal::TERM);
        worker.until_it_says("verified, 0 wrong");
        worker.end().left_nothing();
        let named: Vec<_> = fs::read_dir(self.shm.path()).expect("the folder").collect();
        assert!(named.is_empty(), "{named:?}");
        ended
    }

    fn file(&self, segment: &str) -> PathBuf {
        self.shm.path().join(format!("named.{segment}"))
    }

    fn open(&self, segment: &str) -> File {
        let file = OpenOptions::new().read(true).write(true).open(self.file(segment));
        file.expect("the segment is there")
    }
}

#[test]
fn x26_after_the_death_of_both_sides_the_next_producer_finds_the_pool_warm() {
    let channel = Channel::new();
    channel.killed();
    let next = channel.next();
    let said = "took the channel over as incarnation 2: workers [] live";
    assert!(next.log.contains(said), "{}", next.log);
    assert!(!next.log.contains(" 0 blocks warm"), "{}", next.log);
}

#[test]
fn x26_segments_of_another_boot_cut_short_or_scribbled_over_are_made_anew_with_a_message() {
    type Harm = fn(&Channel);
    let harms: [(Harm, &str); 6] = [
        (
            |channel| {
                channel
                    .open("control")
                    .write_all_at(&[7; 16], BOOT_ID_AT)
                    .expect("write")
            },
            "boot id is 07070707",
        ),
        (
            |channel| channel.open("control").set_len(100).expect("set_len"),
            "control",
        ),
        (
            |channel| channel.open("pool").set_len(1 << 20).expect("set_len"),
            "pool",
        ),
        (
            |channel| channel.open("pool").write_all_at(&[9; 128], 0).expect("write"),
            "pool",
        ),
        (
            |channel| fs::remove_file(channel.file("pool")).expect("unlink"),
            "named.pool is gone",
        ),
        (
            |channel| fs::remove_file(channel.file("control")).expect("unlink"),
            "named.control is gone",
        ),
    ];
    for (harm, said) in harms {
        let channel = Channel::new();
        channel.killed();
        harm(&channel);
        let next = channel.next();
        let message = next
            .log
            .lines()
            .find(|line| line.contains("the named segments are made anew"));
        assert!(message.is_some_and(|line| line.contains(said)), "{said}: {}", next.log);
        assert!(!next.log.contains("took the channel over"), "{}", next.log);
    }
}

#[test]
fn x21_x26_segments_that_are_not_this_users_own_plain_files_are_refused_and_stay() {
    let channel = Channel::new();
    channel.killed();
    let control = channel.file("control");
    let refused = |said: &str| {
        let ended = channel.producer(&["--requests=1"]).end();
        assert_eq!(ended.code, Some(4), "{said}: {}", ended.log);
        assert!(ended.log.contains(said), "{said}: {}", ended.log);
        assert!(fs::symlink_metadata(&control).is_ok(), "{said}: it was removed");
    };
    let mode = |bits| fs::set_permissions(&control, PermissionsExt::from_mode(bits)).expect("chmod");
    mode(0o644);
    refused("mode is 0644, expected 0600; remove it");
    mode(0o600);

    let elsewhere = channel.shm.path().join("elsewhere");
    fs::hard_link(&control, &elsewhere).expect("link");
    refused("number of names is 2, expected 1");
    fs::remove_file(&control).expect("unlink");
    symlink(&elsewhere, &control).expect("symlink");
    refused("type is a link, expected a plain file");
    fs::rename(&elsewhere, &control).expect("rename");

    if getuid().is_root() {
        chown(&control, Some(4711), None).expect("chown");
        refused("owner is uid 4711, expected uid 0");
        chown(&control, Some(0), None).expect("chown");
    } else {
        eprintln!("skipped: only root can give a file to another user");
    }
    // In order again, and warm.
    assert!(channel.next().log.contains("took the channel over as incarnation 2"));
}

#[test]
fn x26_segments_that_a_producer_of_another_runtime_folder_holds_are_refused() {
    let mut channel = Channel::new();
    let (producer, mut worker) = channel.at_work();
    let own = std::mem::replace(&mut channel.runtime, folder());
    for without_pool in [false, true] {
        if without_pool {
            fs::remove_file(channel.file("pool")).expect("unlink");
        }
        let second = channel.producer(&[]).end();
        assert_eq!(second.code, Some(4), "{}", second.log);
        assert!(second.log.contains("is in use by another process"), "{}", second.log);
        assert!(channel.file("control").exists(), "it was removed under its holder");
    }
    channel.runtime = own;
    producer.signal("itself", Signal::TERM);
    let ended = producer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    worker.signal("itself", Signal::TERM);
    worker.until_it_says("verified, 0 wrong");
    worker.end().left_nothing();
}
