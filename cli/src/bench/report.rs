//! What a benchmark says, as JSON or as a table.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;

use super::machine::Machine;

/// One figure against its target.
#[derive(Serialize)]
pub(super) struct Figure {
    /// Its row in the table of targets: P1, P2 and so on.
    pub(super) id: &'static str,
    /// What was measured, in a few words.
    pub(super) what: String,
    /// The figure.
    pub(super) value: f64,
    /// Its unit.
    pub(super) unit: &'static str,
    /// The target, and on which side of it the figure has to be.
    pub(super) target: f64,
    /// `at most` or `at least`.
    pub(super) bound: Bound,
    /// True where the target is met.
    pub(super) met: bool,
    /// What stands behind the figure: names with their units, and values.
    pub(super) detail: serde_json::Map<String, Value>,
}

/// On which side of its target a figure has to be.
#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Bound {
    AtMost,
    AtLeast,
}

impl Figure {
    pub(super) fn new(id: &'static str, what: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            id,
            what: what.into(),
            value,
            unit,
            target: f64::NAN,
            bound: Bound::AtMost,
            met: false,
            detail: serde_json::Map::new(),
        }
    }

    /// The figure is to be at most `target`.
    pub(super) fn at_most(mut self, target: f64) -> Self {
        (self.target, self.bound, self.met) = (target, Bound::AtMost, self.value <= target);
        self
    }

    /// The figure is to be at least `target`.
    pub(super) fn at_least(mut self, target: f64) -> Self {
        (self.target, self.bound, self.met) = (target, Bound::AtLeast, self.value >= target);
        self
    }

    /// Adds a value behind the figure. Fractions are cut to three decimals: more is noise.
    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        let value = match value.into() {
            Value::Number(number) if number.is_f64() => {
                Value::from((number.as_f64().unwrap_or(0.0) * 1000.0).round() / 1000.0)
            }
            other => other,
        };
        self.detail.insert(name.to_owned(), value);
        self
    }
}

/// All figures of one run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) results: Vec<Figure>,
}

impl Report {
    pub(super) fn new(machine: Machine) -> Self {
        Self {
            machine,
            results: Vec::new(),
        }
    }

    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if json {
            serde_json::to_writer_pretty(&mut out, self)?;
            return writeln!(out);
        }
        let m = &self.machine;
        let kind = if m.virtual_machine {
            "virtual machine"
        } else {
            "bare metal"
        };
        writeln!(out, "{}, {} cores, {kind}, Linux {}", m.cpu, m.cores, m.kernel)?;
        writeln!(
            out,
            "{}, kvsluice {} ({} build), pinned to cores {} and {}, load {}",
            m.date, m.version, m.profile, m.pinned[0], m.pinned[1], m.load
        )?;
        for figure in &self.results {
            let bound = match figure.bound {
                Bound::AtMost => "at most",
                Bound::AtLeast => "at least",
            };
            let met = if figure.met { "met" } else { "NOT met" };
            writeln!(
                out,
                "\n{:<3} {}: {:.3} {} (target: {bound} {}): {met}",
                figure.id, figure.what, figure.value, figure.unit, figure.target
            )?;
            for (name, value) in &figure.detail {
                writeln!(out, "    {name:<32} {value}")?;
            }
        }
        Ok(())
    }
}
