//! What a comparison says, as JSON or as a table.

use std::io::{self, Write};

use kvsluice_cpu_worker::compare::logits::{LogitsReport, PositionReport, Tolerance};
use kvsluice_cpu_worker::cost::MovementCounters;
use serde::Serialize;

use super::play::{Played, Way};
use super::selection::Agreement;

/// The whole comparison.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) preset: String,
    pub(super) ranks: u32,
    pub(super) seed: u64,
    pub(super) rounds: u32,
    pub(super) cases: Vec<Case>,
    /// Nothing that is applicable differs.
    pub(super) passed: bool,
}

/// One selection in one dtype, played in all ways.
#[derive(Serialize)]
pub(super) struct Case {
    pub(super) dtype: String,
    pub(super) agreement: Agreement,
    pub(super) tolerance: Limits,
    pub(super) runs: Vec<Run>,
}

/// The tolerance that was declared (R13). Bytes have none (R68).
#[derive(Serialize)]
pub(super) struct Limits {
    logit: f64,
    logprob: f64,
    mass: f64,
}

impl From<Tolerance> for Limits {
    fn from(tolerance: Tolerance) -> Self {
        let Tolerance { logit, logprob, mass } = tolerance;
        Self { logit, logprob, mass }
    }
}

/// One way.
#[derive(Serialize)]
pub(super) struct Run {
    #[serde(flatten)]
    pub(super) way: Way,
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

/// What became of one way.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// It would not be exact for this selection, so it was not run (R51).
    NotApplicable(String),
    /// It was run and compared.
    Compared(Box<Compared>),
}

/// A way that was run.
#[derive(Serialize)]
pub(super) struct Compared {
    pub(super) costs: Costs,
    /// Blocks that retention freed: apart from the bytes that moved (R66).
    pub(super) blocks_released: u64,
    /// Tables, leases and device blocks were all free after the request's end.
    pub(super) left_nothing: bool,
    pub(super) bytes: Bytes,
    /// Against the first way of the case.
    pub(super) logits: Logits,
    /// Against the same blocks in the order of the sequence: the same attention, summed in another order (R69).
    pub(super) logits_in_order: Logits,
}

/// The six movement counters (R2).
#[derive(Serialize)]
pub(super) struct Costs {
    pub(super) cpu_gather_bytes: u64,
    pub(super) cpu_destination_bytes: u64,
    pub(super) h2d_bytes: u64,
    pub(super) gpu_scatter_bytes: u64,
    pub(super) gpu_compaction_bytes: u64,
    pub(super) metadata_bytes: u64,
}

impl From<MovementCounters> for Costs {
    fn from(counters: MovementCounters) -> Self {
        Self {
            cpu_gather_bytes: counters.cpu_gather_bytes,
            cpu_destination_bytes: counters.cpu_destination_bytes,
            h2d_bytes: counters.h2d_bytes,
            gpu_scatter_bytes: counters.gpu_scatter_bytes,
            gpu_compaction_bytes: counters.gpu_compaction_bytes,
            metadata_bytes: counters.metadata_bytes,
        }
    }
}

/// The bytewise comparison, over all rounds, layers and heads (R67).
#[derive(Default, Serialize)]
pub(super) struct Bytes {
    /// Equal to what was made on the host.
    pub(super) equal: u64,
    /// The first difference from that.
    pub(super) differs: Option<String>,
    /// The first difference from the first way of the case.
    pub(super) differs_from_first: Option<String>,
}

/// The comparison of logits under a forced prefix (R12–R14).
#[derive(Serialize)]
pub(super) struct Logits {
    pub(super) positions: usize,
    pub(super) violation_rate: Option<f64>,
    pub(super) same_top1: usize,
    pub(super) largest_logit_error: f64,
    pub(super) largest_logprob_error: f64,
    pub(super) largest_mass_error: f64,
    /// Positions that were left out because the prefixes differ (R14).
    pub(super) diverged: Vec<u32>,
    /// Positions that only one side has (R13).
    pub(super) not_covered: Vec<u32>,
}

impl From<&LogitsReport> for Logits {
    fn from(report: &LogitsReport) -> Self {
        let largest = |of: fn(&PositionReport) -> f64| report.compared.iter().map(of).fold(0.0, f64::max);
        let numbers = |positions: &[kvsluice_layout::ids::TokenPosition]| positions.iter().map(|p| p.get()).collect();
        Self {
            positions: report.compared.len(),
            violation_rate: report.violation_rate(),
            same_top1: report.compared.iter().filter(|position| position.same_top1).count(),
            largest_logit_error: largest(|position| position.logit_error),
            largest_logprob_error: largest(|position| position.logprob_error),
            largest_mass_error: largest(|position| position.mass_error),
            diverged: numbers(&report.diverged),
            not_covered: numbers(&report.not_covered),
        }
    }
}

impl Logits {
    fn passes(&self) -> bool {
        self.violation_rate == Some(0.0)
    }
}

impl Compared {
    /// A run without its comparisons.
    pub(super) fn new(played: &Played, bytes: Bytes, logits: &LogitsReport, in_order: &LogitsReport) -> Self {
        Self {
            costs: played.costs.into(),
            blocks_released: played.blocks_released,
            left_nothing: played.left_nothing,
            bytes,
            logits: logits.into(),
            logits_in_order: in_order.into(),
        }
    }

    fn passes(&self) -> bool {
        let Bytes {
            equal,
            differs,
            differs_from_first,
        } = &self.bytes;
        let same = differs.is_none() && differs_from_first.is_none() && *equal > 0;
        same && self.left_nothing && self.logits.passes() && self.logits_in_order.passes()
    }
}

impl Outcome {
    /// True unless it was run and differs.
    pub(super) fn passes(&self) -> bool {
        match self {
            Self::NotApplicable(_) => true,
            Self::Compared(compared) => compared.passes(),
        }
    }
}

impl Report {
    /// Prints it to standard output.
    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if json {
            serde_json::to_writer_pretty(&mut out, self)?;
            return writeln!(out);
        }
        let Self {
            preset,
            ranks,
            seed,
            rounds,
            ..
        } = self;
        writeln!(out, "{preset}, {ranks} ranks, {rounds} rounds, seed {seed}")?;
        for case in &self.cases {
            case.print(&mut out)?;
        }
        writeln!(out, "\n{}", if self.passed { "all equal" } else { "NOT equal" })
    }
}

impl Case {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let Limits { logit, logprob, mass } = self.tolerance;
        let agreement = match self.agreement {
            Agreement::PerGroup => "the layers of a group select alike",
            Agreement::PerLayer => "every layer selects for itself",
        };
        writeln!(
            out,
            "\n{}, {agreement}; tolerance: logit {logit}, logprob {logprob}, mass {mass}",
            self.dtype
        )?;
        writeln!(
            out,
            "  {:<11} {:<12} {:>10} {:>10} {:>10} {:>8} {:>10} {:>9} {:>8}  {:>11} {:>12} {:>12}",
            "sources",
            "retention",
            "cpu gather",
            "cpu dest.",
            "h2d",
            "scatter",
            "gpu moved",
            "metadata",
            "released",
            "equal bytes",
            "violations",
            "in order"
        )?;
        for run in &self.runs {
            let name = |value: serde_json::Result<serde_json::Value>| {
                value
                    .ok()
                    .and_then(|value| Some(value.as_str()?.to_owned()))
                    .unwrap_or_default()
            };
            let (sources, retaining) = (
                name(serde_json::to_value(run.way.sources)),
                name(serde_json::to_value(run.way.retaining)),
            );
            write!(out, "  {sources:<11} {retaining:<12} ")?;
            match &run.outcome {
                Outcome::NotApplicable(why) => writeln!(out, "not applicable: {why}")?,
                Outcome::Compared(compared) => compared.print(out)?,
            }
        }
        Ok(())
    }
}

impl Compared {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let Costs {
            cpu_gather_bytes,
            cpu_destination_bytes,
            h2d_bytes,
            gpu_scatter_bytes,
            gpu_compaction_bytes,
            metadata_bytes,
        } = self.costs;
        let rate = |logits: &Logits| {
            logits
                .violation_rate
                .map_or("nothing".to_owned(), |rate| format!("{rate:.3}"))
        };
        writeln!(
            out,
            "{cpu_gather_bytes:>10} {cpu_destination_bytes:>10} {h2d_bytes:>10} {gpu_scatter_bytes:>8} \
             {gpu_compaction_bytes:>10} {metadata_bytes:>9} {:>8}  {:>11} {:>12} {:>12}",
            self.blocks_released,
            self.bytes.equal,
            rate(&self.logits),
            rate(&self.logits_in_order)
        )?;
        let differences = [
            ("the host's bytes", &self.bytes.differs),
            ("the first way", &self.bytes.differs_from_first),
        ];
        for (what, why) in differences
            .into_iter()
            .filter_map(|(what, why)| Some((what, why.as_ref()?)))
        {
            writeln!(out, "      differs from {what}: {why}")?;
        }
        for (what, logits) in [("first way", &self.logits), ("in order", &self.logits_in_order)] {
            let Logits {
                diverged, not_covered, ..
            } = logits;
            if !diverged.is_empty() || !not_covered.is_empty() {
                writeln!(
                    out,
                    "      {what}: positions diverged {diverged:?}, not covered {not_covered:?}"
                )?;
            }
        }
        if !self.left_nothing {
            writeln!(out, "      tables, leases or device blocks were left behind")?;
        }
        Ok(())
    }
}
