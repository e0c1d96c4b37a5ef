//! `kvsluice sim`: the whole channel under one seeded scheduler, checked after every step.
//!
//! One producer and 1 to 8 workers, each on a device that delays, tears, interleaves and fails, run the production code
//! in one thread and in simulated time. Processes crash between any two stores and start again, stop, answer out of
//! order and twice, and write hostile words; the ring fills up, operations are aborted, pools are reset. What must hold
//! is checked by an account of its own ([`model`]). A seed determines everything: it replays a failure bit for bit.

mod client;
mod history;
mod memory;
mod model;
mod schedule;
mod seat;
mod shape;
mod spec;
#[cfg(test)]
mod tests;
mod world;

use clap::Args;
use serde::Serialize;

use schedule::Schedule;
use shape::RANKS_MAX;

use crate::print::print;

/// What to simulate.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimArgs {
    /// Seed of everything that happens
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Steps: each one action of one process, or one piece of work of one device
    #[arg(long, default_value_t = 100_000)]
    steps: u64,
    /// Ranks, 1 to 8; by default as the seed says
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(RANKS_MAX)))]
    ranks: Option<u32>,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// What a simulation came to.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The seed.
    pub seed: u64,
    /// Ranks of the channel.
    pub ranks: u32,
    /// Steps that were made, up to the violation where there is one.
    pub steps: u64,
    /// Digest of the history: equal for equal runs.
    pub digest: String,
    /// Records that were published.
    pub records: u64,
    /// Answers of workers.
    pub answers: u64,
    /// Operations that every rank ended as Done.
    pub done: u64,
    /// Operations that ended otherwise.
    pub not_done: u64,
    /// Plans that the producer refused, and those of them for want of ring space.
    pub refused: u64,
    /// Plans refused by a full ring.
    pub full: u64,
    /// Aborts that were asked for.
    pub aborts: u64,
    /// Resets that were asked for.
    pub resets: u64,
    /// Refills of blocks of the pool.
    pub refills: u64,
    /// Deaths of producers.
    pub producer_deaths: u64,
    /// Takeovers that came to their end.
    pub takeovers: u64,
    /// Takeovers after which the residency of the devices was adopted.
    pub adopted: u64,
    /// Deaths of workers.
    pub worker_deaths: u64,
    /// Workers that joined.
    pub joins: u64,
    /// Times that hostile words were written.
    pub scribbles: u64,
    /// Pauses after which everything had ended and the account was balanced.
    pub drains: u64,
    /// The rule that did not hold, and what was seen.
    pub violation: Option<String>,
    /// The last events before the violation.
    pub trace: Vec<String>,
}

/// Simulates and reports.
///
/// # Errors
/// Only where the simulation cannot start. A broken rule is part of the report.
pub(crate) fn simulate(seed: u64, steps: u64, ranks: Option<u32>) -> anyhow::Result<Report> {
    let mut schedule = Schedule::new(seed, ranks)?;
    let mut violation = None;
    while violation.is_none() && schedule.world.history.step < steps {
        violation = schedule.step().err();
    }
    let world = &schedule.world;
    let (seen, tally) = (world.model.seen, world.tally);
    Ok(Report {
        seed,
        ranks: world.ranks(),
        steps: world.history.step,
        digest: format!("{:016x}", world.history.digest()),
        records: seen.records,
        answers: seen.answers,
        done: seen.done,
        not_done: seen.not_done,
        refused: tally.refused,
        full: tally.full,
        aborts: tally.aborts,
        resets: tally.resets,
        refills: tally.refills,
        producer_deaths: tally.producer_deaths,
        takeovers: tally.takeovers,
        adopted: tally.adopted,
        worker_deaths: tally.worker_deaths,
        joins: tally.joins,
        scribbles: tally.scribbles,
        drains: tally.drains,
        trace: match violation {
            Some(_) => world.history.recent().map(ToString::to_string).collect(),
            None => Vec::new(),
        },
        violation: violation.map(|violation| violation.to_string()),
    })
}

/// Runs `kvsluice sim`. True where no rule was broken.
///
/// # Errors
/// Where the simulation cannot start, or its result cannot be printed.
pub(crate) fn run(args: &SimArgs) -> anyhow::Result<bool> {
    // Workers warn of every plan that they reject, and here most are rejected on purpose.
    let quiet = tracing::subscriber::NoSubscriber::default();
    let report = tracing::subscriber::with_default(quiet, || simulate(args.seed, args.steps, args.ranks))?;
    if args.json {
        print(serde_json::to_string(&report)?)?;
        return Ok(report.violation.is_none());
    }
    let Report {
        seed,
        ranks,
        steps,
        digest,
        ..
    } = &report;
    print(format_args!(
        "seed {seed}, {ranks} ranks, {steps} steps, digest {digest}"
    ))?;
    print(format_args!(
        "{} records, {} answers, {} done, {} not done; {} refused, {} of them by a full ring; {} aborts, {} resets",
        report.records,
        report.answers,
        report.done,
        report.not_done,
        report.refused,
        report.full,
        report.aborts,
        report.resets
    ))?;
    print(format_args!(
        "{} producers died, {} takeovers, {} adopted; {} workers died, {} joined; {} hostile writes; {} pauses",
        report.producer_deaths,
        report.takeovers,
        report.adopted,
        report.worker_deaths,
        report.joins,
        report.scribbles,
        report.drains
    ))?;
    match &report.violation {
        None => print("no rule was broken")?,
        Some(violation) => {
            for event in &report.trace {
                print(event)?;
            }
            print(format_args!("BROKEN at step {steps}: {violation}"))?;
            print(format_args!(
                "replay: kvsluice sim --seed {seed} --steps {} --ranks {ranks}",
                steps + 1
            ))?;
        }
    }
    Ok(report.violation.is_none())
}
