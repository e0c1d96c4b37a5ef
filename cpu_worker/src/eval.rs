//! The decision core behind JSON lines: what `kvsluice eval <domain>` does.
//!
//! One object per line in, one object per line out, in order. This is how the core is checked from outside, and how
//! another engine checks its own planner against ours. A malformed line is answered with `bad_input` and changes
//! nothing.

mod fields;
mod ledger;
mod names;
mod plan;
mod retain;
mod select;
mod validate;

use std::io::{BufRead, Result, Write};

use serde_json::{Value, json};

use crate::planner::Planner;
use crate::retain::RetainPlanner;
use crate::selector::Selector;
use fields::{BadInput, Fields};

/// What is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Whole-block check (R37).
    Validate,
    /// Block selector (R28, R33–R36).
    Select,
    /// Planner (R29–R32, R38–R40).
    Plan,
    /// Retention (R51–R53).
    Retain,
    /// Ledger (R42–R50, R59): lines are operations on one state.
    Ledger,
}

/// Answers the lines of one domain.
#[derive(Debug)]
pub struct Evaluator(State);

#[derive(Debug)]
enum State {
    Validate,
    Select(Selector),
    Plan(Box<Planner>),
    Retain(Box<RetainPlanner>),
    Ledger(ledger::Sequence),
}

impl Evaluator {
    /// An evaluator without state.
    pub fn new(domain: Domain) -> Self {
        Self(match domain {
            Domain::Validate => State::Validate,
            Domain::Select => State::Select(Selector::new()),
            Domain::Plan => State::Plan(Box::default()),
            Domain::Retain => State::Retain(Box::default()),
            Domain::Ledger => State::Ledger(ledger::Sequence::default()),
        })
    }

    /// The answer to one line (without its line end), itself without a line end.
    pub fn answer_line(&mut self, line: &[u8]) -> String {
        let answer = Fields::parse_line(line).and_then(|fields| match &mut self.0 {
            State::Validate => validate::answer(&fields),
            State::Select(selector) => select::answer(selector, &fields),
            State::Plan(planner) => plan::answer(planner, &fields),
            State::Retain(planner) => retain::answer(planner, &fields),
            State::Ledger(sequence) => sequence.answer(&fields),
        });
        answer
            .unwrap_or_else(|BadInput(detail)| json!({ "error": "bad_input", "detail": detail }))
            .to_string()
    }

    /// Answers every line of `input` on `output`, each flushed before the next is read.
    pub fn serve(&mut self, mut input: impl BufRead, mut output: impl Write) -> Result<()> {
        let mut line = Vec::new();
        while input.read_until(b'\n', &mut line)? > 0 {
            let text = line.strip_suffix(b"\n").unwrap_or(&line);
            writeln!(output, "{}", self.answer_line(text))?;
            output.flush()?;
            line.clear();
        }
        Ok(())
    }
}

/// The answer to an input that the contract refuses, with the reason in words beside the contract's own word.
fn refusal(word: &str, error: &dyn std::error::Error) -> Value {
    json!({ "error": word, "detail": error.to_string() })
}
