//! What a user gets wrong, and what the binary says to that: which value, what it should be, what to do.

use std::fs;

use crate::running::{Ended, Program, folder};

fn run(args: &[&str]) -> Ended {
    Program::run(args, "").end()
}

#[test]
fn options_that_cannot_be_used_are_refused_with_code_2_before_any_process_starts() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    let empty = format!("--trace={}", empty.path().display());
    for (args, said) in [
        (&["--rankss=2"][..], "a similar argument exists: '--ranks'"),
        (&["--preset=llama-3.1-9b"], "did you mean \"llama-3.1-8b\"?"),
        (
            &["--geometry=/nowhere/geometry.toml"],
            "cannot read geometry file /nowhere/geometry.toml",
        ),
        (&["--ranks=0"], "geometry field ranks: found 0, expected"),
        (&["--ring-bytes=4MB"], "for example 4MiB"),
        (&["--retain=never"], "[possible values: auto, byte-move]"),
        (&["--persist=/dev/shm", "--hardened"], "cannot be used with"),
        (
            &["--concurrency=0"],
            "workload option concurrency: found 0, expected at least 1",
        ),
        (&["--drift=2"], "workload option drift: found 2, expected 0 to 1"),
        (&["--source-mode=copy"], "raise --gather-blocks, or use source-only"),
        (
            &["--device-blocks=2"],
            "raise --device-blocks, or lower sink and recent",
        ),
        (&["--ring-bytes=5000"], "ring of 5000 bytes: expected a power of two"),
        (
            &["--trace=/nowhere/trace.jsonl"],
            "cannot open trace /nowhere/trace.jsonl",
        ),
        (&["--trace=/dev"], "/dev, line 1: Is a directory"),
        (&[&empty], "found no request, expected one a line"),
    ] {
        let ended = run(args);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.log);
        assert!(ended.log.contains(said), "{args:?}: {}", ended.log);
        assert!(!ended.log.contains("started role"), "{args:?}: {}", ended.log);
    }
}

#[test]
fn what_a_side_refuses_ends_the_run_with_code_4_and_the_sides_own_words() {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let request = r#"{"input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}"#;
    fs::write(&trace, format!("{request}\n{{}}\n")).unwrap();
    let trace = format!("--trace={}", trace.path().display());
    for (args, said) in [
        (&[trace.as_str()][..], ", line 2: missing field `input_length`"),
        (&["--rounds-log=/nowhere/rounds.jsonl"], "/nowhere/rounds.jsonl"),
    ] {
        let ended = run(args);
        assert_eq!(ended.code, Some(4), "{args:?}: {}", ended.log);
        assert!(ended.log.contains(said), "{args:?}: {}", ended.log);
        ended.left_nothing();
    }
}

#[test]
fn a_configuration_file_sets_options_and_flags_win() {
    let folder = folder();
    let file = folder.path().with_extension("toml");
    fs::write(
        &file,
        "ranks = 4\nrequests = 7\nrank = 0\nhardened = true\nretain = \"byte-move\"\n",
    )
    .unwrap();
    let config = format!("--config={}", file.display());
    let ended = Program::start(&folder, &["run", "--json", &config, "--requests=5"], "").end();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert_eq!((ended.number("/ranks"), ended.number("/requests")), (4, 5));
    fs::write(&file, "rankss = 3\n").unwrap();
    let refused = run(&[&config]);
    assert_eq!(refused.code, Some(2), "{}", refused.log);
    assert!(refused.log.contains("there is no option \"rankss\""), "{}", refused.log);
    fs::remove_file(file).unwrap();
}

#[test]
fn x32_doctor_says_what_it_looked_at() {
    let ended = Program::start(&folder(), &["doctor", "--json"], "").end();
    let report = ended.report.unwrap();
    let findings = report["findings"].as_array().unwrap();
    for subject in ["kernel", "memory", "locked memory", "runtime folder"] {
        assert!(
            findings.iter().any(|found| found["subject"] == subject),
            "no {subject} in {report}"
        );
    }
}

#[test]
fn x21_every_segment_mode_plays_the_trace_and_leaves_nothing() {
    // Named segments must lie on a tmpfs.
    let shm = tempfile::Builder::new()
        .prefix("kvsluice-run-")
        .tempdir_in("/dev/shm")
        .unwrap();
    let persist = format!("--persist={}", shm.path().display());
    for mode in [persist.as_str(), "--hardened"] {
        let ended = run(&[mode, "--requests=20"]);
        ended.left_nothing();
        assert_eq!(ended.code, Some(0), "{mode}: {}", ended.log);
        assert_eq!(ended.number("/mismatched_bytes") + ended.number("/leaked_blocks"), 0);
    }
    let named: Vec<_> = fs::read_dir(shm.path()).unwrap().collect();
    assert!(named.is_empty(), "{named:?}");
}

#[test]
fn a_reader_of_the_output_that_has_seen_enough_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let commands: [&[&str]; 4] = [
        &["doctor"],
        &["sim", "--steps=1000"],
        &["sim", "--steps=1000", "--json"],
        &["clean", "--list"],
    ];
    for args in commands {
        let mut command = std::process::Command::new(crate::BINARY);
        let writer = writer.try_clone().unwrap();
        let ended = command.args(args).stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!said.contains("panicked"), "{args:?}: {said}");
        assert!(
            ended.status.code().is_some_and(|code| code <= 1),
            "{args:?}: {:?}",
            ended.status
        );
    }
}
