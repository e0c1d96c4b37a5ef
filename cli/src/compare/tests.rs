//! The comparison passes on what production does, and sees every fault.

use clap::Parser;
use kvsluice_layout::planted::with_planted;

use super::report::{Compared, Outcome, Report, Run};
use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: CompareArgs,
}

fn report(words: &[&str]) -> Result<Report> {
    let line = Line::try_parse_from([&["compare"], words].concat())?;
    compare(&line.args)
}

/// The run of one way in a case, if it was applicable.
fn compared(case: &Case, sources: Sources, retaining: Retaining) -> Option<&Compared> {
    let run = case.runs.iter().find(|run| run.way == Way { sources, retaining })?;
    match &run.outcome {
        Outcome::Compared(compared) => Some(compared),
        Outcome::NotApplicable(_) => None,
    }
}

/// The runs that failed.
fn failed(report: &Report) -> Vec<Way> {
    let runs = report.cases.iter().flat_map(|case| &case.runs);
    runs.filter(|run| !run.outcome.passes()).map(|run| run.way).collect()
}

#[test]
fn r1_r2_r11_r66_six_ways_to_one_selection_are_equal_bytewise_and_their_costs_are_not() {
    let report = || report(&["--ranks", "2"]).unwrap();
    let all = report();
    assert!(all.passed, "{:?}", failed(&all));
    assert_eq!(all.cases.len(), 4);
    for case in &all.cases {
        for sources in [Sources::Copy, Sources::SourceOnly] {
            // R51: one table where it is exact, and nowhere else.
            let shared = compared(case, sources, Retaining::SharedRemap);
            assert_eq!(shared.is_some(), case.agreement == Agreement::PerGroup);
        }
    }
    assert_eq!(not_told_apart(&all), []);
    for fault in ["r1_source_only_moves_nothing", "r66_released_where_bytes_moved"] {
        let found = not_told_apart(&with_planted(fault, report));
        assert!(!found.is_empty(), "the planted fault {fault} is not seen");
    }
}

/// The ways of moved bytes and of tables per layer whose costs are not each what the way says.
fn not_told_apart(report: &Report) -> Vec<Way> {
    let apart = |run: &&Run| {
        let Way { sources, retaining } = run.way;
        let Outcome::Compared(compared) = &run.outcome else {
            return false;
        };
        let Compared {
            costs,
            bytes,
            blocks_released,
            ..
        } = &**compared;
        // R1: what the CPU gathers says nothing of what the GPU moves, and the other way round.
        let copied = [costs.cpu_gather_bytes > 0, costs.cpu_destination_bytes > 0];
        let moved = costs.gpu_compaction_bytes > 0;
        // R2, R66: and neither says anything of the others, nor of what is released.
        let others = [costs.h2d_bytes, costs.metadata_bytes, bytes.equal, *blocks_released];
        copied == [sources == Sources::Copy; 2]
            && moved == (retaining == Retaining::ByteMove)
            && others.iter().all(|cost| *cost > 0)
    };
    let runs = report.cases.iter().flat_map(|case| &case.runs);
    let both = runs.filter(|run| run.way.retaining != Retaining::SharedRemap);
    both.filter(|run| !apart(run)).map(|run| run.way).collect()
}

#[test]
fn r12_r69_the_same_bytes_give_the_same_logits_and_another_order_is_within_its_tolerance() {
    for case in &report(&["--agreement", "per-group"]).unwrap().cases {
        let run = compared(case, Sources::SourceOnly, Retaining::SharedRemap).unwrap();
        assert_eq!((run.logits.positions, run.logits.largest_logit_error), (16, 0.0));
        assert_eq!(run.logits_in_order.violation_rate, Some(0.0));
        assert!(
            run.logits_in_order.largest_logit_error > 0.0,
            "the order of slots is not that of the sequence"
        );
        assert!(run.logits.diverged.is_empty() && run.logits.not_covered.is_empty());
    }
}

#[test]
fn r67_one_flipped_byte_on_one_device_fails_one_way_and_no_other() {
    let report = report(&["--flip-byte", "--dtype", "bf16"]).unwrap();
    assert!(!report.passed);
    assert_eq!(failed(&report), [FLIPPED, FLIPPED]);
    let bytes = &compared(&report.cases[0], FLIPPED.sources, FLIPPED.retaining)
        .unwrap()
        .bytes;
    assert!(
        bytes.differs.as_ref().is_some_and(|why| why.contains("layer 0 head 0")),
        "{:?}",
        bytes.differs
    );
    assert!(bytes.differs_from_first.is_some());
}

#[test]
fn r13_a_dtype_without_a_declared_tolerance_is_refused() {
    let refused = report(&["--tolerance", "f32=1e-5"]).err().unwrap().to_string();
    assert!(refused.contains("no tolerance is declared for bf16"), "{refused}");
    assert!(report(&["--tolerance", "f32=1e-5:1e-5"]).is_err() && report(&["--tolerance", "f32=-1"]).is_err());
    assert!(
        report(&["--tolerance", "f32=1e-5:1e-4:1e-6", "--dtype", "f32"])
            .unwrap()
            .passed
    );
}

#[test]
fn x8_r67_every_shape_of_group_and_layer_is_compared_and_an_alias_has_no_byte_move() {
    let report = report(&[
        "--preset",
        "sample-hybrid",
        "--dtype",
        "bf16",
        "--blocks",
        "12",
        "--budget",
        "4",
    ])
    .unwrap();
    assert!(report.passed, "{:?}", failed(&report));
    for case in &report.cases {
        assert!(compared(case, Sources::Copy, Retaining::ByteMove).is_none());
        assert!(
            compared(case, Sources::SourceOnly, Retaining::LayerRemap)
                .unwrap()
                .bytes
                .equal
                > 1 << 16
        );
    }
}

#[test]
fn each_planted_fault_fails_the_comparison() {
    let words = ["--ranks", "2", "--dtype", "bf16"];
    for fault in [
        "r51_prefix",
        "moves_in_one_batch",
        "r51_shares_anyway",
        "x8_skip_shard",
        "x11_first_rank_completes",
    ] {
        let passes = with_planted(fault, || report(&words).is_ok_and(|report| report.passed));
        assert!(!passes, "the planted fault {fault} is not seen");
    }
}
