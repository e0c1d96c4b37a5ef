//! `kvsluice eval` as another engine uses it: a process, one line in, one line out.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

fn eval(domain: &str) -> Command {
    let mut command = Command::new(crate::BINARY);
    command.args(["eval", domain]).env_remove("KVSLUICE_PLANTED");
    command
}

/// The question of a step: an object as `in`, or, where it is about the text itself, the `line`.
fn question(step: &Value) -> String {
    let line = step.get("line").and_then(Value::as_str);
    line.map_or_else(|| step["in"].to_string(), str::to_owned)
}

/// Asks one question at a time and waits for its answer: a binary that does not flush hangs here.
fn answers_in_lockstep(file: &Path, domain: &str) -> Result<usize, Box<dyn Error>> {
    let mut child = eval(domain).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut ask = child.stdin.take().ok_or("no stdin")?;
    let mut told = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
    let mut compared = 0;
    for vector in fs::read_to_string(file)?.lines() {
        let vector: Value = serde_json::from_str(vector)?;
        let single = [vector.clone()];
        let steps = vector
            .get("seq")
            .and_then(Value::as_array)
            .map_or(&single[..], Vec::as_slice);
        for step in steps {
            let question = question(step);
            writeln!(ask, "{question}")?;
            let answer: Value = serde_json::from_str(&told.next().ok_or("no answer")??)?;
            for (key, expected) in step["out"].as_object().ok_or("no out")? {
                if answer.get(key) != Some(expected) {
                    return Err(format!("{}: {question}: {key}: {answer}", file.display()).into());
                }
            }
            compared += 1;
        }
    }
    drop(ask);
    assert!(child.wait()?.success());
    Ok(compared)
}

#[test]
fn every_vector_is_answered_by_the_binary_line_by_line() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cpu_worker/vectors");
    let mut files = 0;
    for entry in fs::read_dir(vectors).unwrap() {
        let path = entry.unwrap().path();
        let domain = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert!(answers_in_lockstep(&path, &domain).unwrap() > 0, "{}", path.display());
        files += 1;
    }
    assert!(files >= 5);
}

#[test]
fn a_domain_that_does_not_exist_is_refused_with_the_ones_that_do() {
    let output = eval("plans").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("validate, select, plan, retain, ledger"), "{said}");
}
