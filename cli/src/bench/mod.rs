//! `kvsluice bench`: what the transport costs, beside what the machine itself costs (P1, P2, P3, P6, P8, P9).
//!
//! Every figure is a ratio of two measurements of one run: the product, and a bare baseline between the same two
//! pinned processes, in short rounds that alternate. How each is measured is said at the top of its module; what came
//! out on which machine is in `docs/benchmarks.md`.

mod allocations;
mod bare;
mod hotpath;
mod large;
mod latency;
mod link;
mod machine;
mod peer;
mod planner;
mod plans;
mod recovery;
mod report;
mod rounds;
mod throughput;
mod wake;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use report::Report;

/// Arguments of `kvsluice bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// One-way latency of a small plan against a bare cache-line ping-pong (P1)
    Latency(Options),
    /// Sustained plans against bare copies of the same bytes (P2, P3)
    Throughput(Options),
    /// Heap allocations and system calls per plan (P8)
    Hotpath(Options),
    /// Latency of waking a sleeping worker against a bare futex, and the cost of an idle one (P6)
    Wake(Options),
    /// Time of one plan on one core (P9)
    Planner(Options),
    /// From the attach of a side that was killed and started again to the next transfer that is Done (P7)
    Recovery(Options),
    /// All of them
    All(Options),
    /// The other process of a measurement
    #[command(hide = true)]
    Peer(peer::PeerArgs),
    /// The measurement that `hotpath` counts in
    #[command(hide = true)]
    Busy(Options),
}

/// What every measurement takes.
#[derive(Args, Clone)]
pub(crate) struct Options {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// The two cores to run on; by default the first two that this process may use
    #[arg(long, value_name = "PRODUCER,WORKER", value_delimiter = ',', num_args = 1)]
    cores: Option<Vec<usize>>,
    /// Rounds of each kind, baseline and product in turn
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Bytes of the plan ring, in KiB (a power of two)
    #[arg(long, default_value_t = 128)]
    ring_kib: usize,
}

/// Options that were checked once, before anything is pinned.
pub(crate) struct Setup {
    /// Cores of the producer and of the worker.
    cores: [usize; 2],
    rounds: usize,
    ring_bytes: usize,
}

impl Options {
    fn check(&self) -> Result<Setup> {
        let allowed = machine::allowed_cores()?;
        let asked = self
            .cores
            .clone()
            .unwrap_or_else(|| allowed.iter().copied().take(2).collect());
        match asked[..] {
            [a, b] if a != b && allowed.contains(&a) && allowed.contains(&b) => Ok(Setup {
                cores: [a, b],
                rounds: self.rounds,
                ring_bytes: self.ring_kib * 1024,
            }),
            _ => anyhow::bail!(
                "cores {asked:?}: two processes that spin need two different cores of {allowed:?}; \
                 name them with --cores A,B or run on a machine with two"
            ),
        }
    }
}

/// Runs one benchmark and prints its report.
///
/// # Errors
/// What kept it from measuring: too few cores, segments that cannot be made, a peer that died.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let (options, parts): (&Options, &[Part]) = match &args.what {
        What::Peer(args) => return peer::run(args),
        What::Busy(options) => return hotpath::busy(&options.check()?),
        What::Wake(options) => (options, &[wake::run]),
        What::Planner(options) => (options, &[planner::run]),
        What::Latency(options) => (options, &[latency::run]),
        What::Throughput(options) => (options, &[throughput::run, large::run]),
        What::Hotpath(options) => (options, &[hotpath::run]),
        What::Recovery(options) => (options, &[recovery::run]),
        What::All(options) => (options, ALL),
    };
    let setup = options.check()?;
    let mut report = Report::new(machine::Machine::read(setup.cores)?);
    for part in parts {
        report.results.extend(part(&setup)?);
    }
    report.print(options.json).context("cannot print the report")
}

const ALL: &[Part] = &[
    latency::run,
    throughput::run,
    large::run,
    wake::run,
    hotpath::run,
    planner::run,
    recovery::run,
];

type Part = fn(&Setup) -> Result<Vec<report::Figure>>;
