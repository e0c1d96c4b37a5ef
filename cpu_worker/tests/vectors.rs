//! The conformance vectors, through the same door as `kvsluice eval`: our own, and the shared ones where they are present.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use kvsluice_cpu_worker::eval::{Domain, Evaluator};
use kvsluice_layout::planted::with_planted;
use serde_json::Value;

const DOMAINS: [(&str, Domain); 5] = [
    ("validate", Domain::Validate),
    ("select", Domain::Select),
    ("plan", Domain::Plan),
    ("retain", Domain::Retain),
    ("ledger", Domain::Ledger),
];

/// Where the answer lacks something that is expected, or has something else. Extra keys of an answer are allowed at its
/// top level only.
fn difference(expected: &Value, answer: &Value) -> Option<String> {
    for (key, value) in expected.as_object()? {
        if answer.get(key) != Some(value) {
            return Some(format!(
                "{key}: expected {value}, got {}",
                answer.get(key).unwrap_or(&Value::Null)
            ));
        }
    }
    None
}

/// The question: a vector gives an object as `in`, or, where it is about the text itself, the `line`.
fn line_of(step: &Value) -> String {
    step.get("line")
        .and_then(Value::as_str)
        .map_or_else(|| step["in"].to_string(), str::to_owned)
}

/// Runs one file; returns how many answers were compared.
fn run(folder: &Path, (name, domain): (&str, Domain)) -> Result<usize, Box<dyn Error>> {
    let path = folder.join(format!("{name}.jsonl"));
    let text = fs::read_to_string(&path)?;
    let mut evaluator = Evaluator::new(domain);
    let mut compared = 0;
    for (number, line) in (1..).zip(text.lines()) {
        let vector: Value = serde_json::from_str(line)?;
        let single = [vector.clone()];
        let steps = vector
            .get("seq")
            .and_then(Value::as_array)
            .map_or(&single[..], Vec::as_slice);
        for (step, vector) in steps.iter().enumerate() {
            let question = line_of(vector);
            let answer: Value = serde_json::from_str(&evaluator.answer_line(question.as_bytes()))?;
            if let Some(difference) = difference(&vector["out"], &answer) {
                let shown: String = question.chars().take(600).collect();
                return Err(format!("{}:{number} step {step}: {difference}\n  in {shown}", path.display()).into());
            }
            compared += 1;
        }
    }
    Ok(compared)
}

#[test]
fn every_vector_of_this_crate_is_answered_as_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    for domain in DOMAINS {
        assert!(run(&folder, domain).unwrap() > 0);
    }
}

#[test]
fn each_planted_fault_turns_the_vectors_red() {
    let faults = [
        ("r37_no_sign_check", 0),
        ("r33_accepts_nan", 1),
        ("r33_no_tie_break", 1),
        ("r15_tail_by_id", 1),
        ("r29_drop_rank_order", 2),
        ("r32_no_full_fallback", 2),
        ("r31_pad_duplicates", 2),
        ("r38_tail_last_is_max", 2),
        ("r53_any_order", 3),
        ("r7_r52_compare_as_sets", 3),
        ("r51_prefix", 3),
        ("r60_counts_acks", 4),
        ("r46_epoch_ignored", 4),
        ("r50_r60_first_rank_commits", 4),
        ("r47_retry_uploads_again", 4),
        ("r49_splits_ids", 4),
        ("r46_stale_ack_moves_back", 4),
        ("r44_zero_delta_moves_g", 4),
        ("r42_zero_delta_not_finalised", 4),
        ("r42_zero_delta_skips_ranks", 4),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    for (fault, domain) in faults {
        let outcome = with_planted(fault, || run(&folder, DOMAINS[domain]));
        assert!(
            outcome.is_err(),
            "no vector of {} sees the planted fault {fault}",
            DOMAINS[domain].0
        );
    }
}

#[test]
fn every_shared_vector_is_answered_as_it_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let candidates: [PathBuf; 2] = [root.join("shared/vectors"), root.join("../shared/vectors")];
    let Some(folder) = candidates.iter().find(|folder| folder.is_dir()) else {
        println!("SKIPPED: no shared vectors beside this checkout");
        return;
    };
    for domain in DOMAINS {
        println!("{}: {} answers compared", domain.0, run(folder, domain).unwrap());
    }
}
