//! P7: `kill -9` of either side, to the next transfer that is Done on every rank.
//!
//! Real processes, as `kvsluice run` starts them, with every byte verified. The clock runs from the moment at which the
//! restarted side has attached (a worker) or adopted its workers (a producer), in the producer's own time: what comes
//! before is the start of a process, which stands next to it. The processes are not pinned: there are three of them.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::Setup;
use super::report::Figure;
use crate::chaos::{self, Plan, Recovery, Target};

/// P7: milliseconds.
const TARGET_MS: f64 = 50.0;
/// Long enough for any number of rounds on any machine.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let sides = [("producer", Target::Producer), ("worker", Target::Worker)];
    sides
        .into_iter()
        .map(|(side, target)| measure(setup, side, target))
        .collect()
}

fn measure(setup: &Setup, side: &str, target: Target) -> Result<Figure> {
    let plan = Plan {
        target,
        seed: 1,
        length: PATIENCE,
        kills_max: setup.rounds as u64,
        ranks: 2,
        warm: true,
        always_calm: true,
    };
    let tally = chaos::run(&plan, None, &|_| vec!["--ranks=2".into()])?;
    let faults = tally.faults();
    ensure!(faults.is_empty(), "the run is not sound: {}", faults.join(", "));
    let attached = Recovery::of(&tally.attach_to_done);
    let whole = Recovery::of(&tally.recovery);
    let what = format!("attach of a killed {side} to the next Done, p99");
    Ok(Figure::new("P7", what, attached.p99, "ms")
        .at_most(TARGET_MS)
        .with("p50, ms", attached.p50)
        .with("max, ms", attached.max)
        .with("kill to Done p50, ms", whole.p50)
        .with("kill to Done p99, ms", whole.p99)
        .with("kill to Done max, ms", whole.max)
        .with("kills", tally.kills()))
}
