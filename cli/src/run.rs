//! `kvsluice run`: one producer and R workers on this machine, each a process, watched from here.

use anyhow::Context;
use clap::{ArgMatches, Args};
use kvsluice_transport::names::{ChannelName, Role};

use crate::clean;
use crate::exit::Exit;
use crate::options::{
    ChannelArgs, DeviceArgs, GeometryArgs, PatienceArgs, SegmentArgs, VerifyArgs, WorkloadArgs, channel_name,
};
use crate::print::print;
use crate::report::{Pids, Report};
use crate::supervisor::{Ending, Supervisor};

/// Options of `run`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    kvsluice run                                     the built-in trace, two workers\n  \
    kvsluice run --ranks 4 --trace conversation.jsonl --requests 2000 --json\n  \
    kvsluice run --preset sample-hybrid --adversary 7   hostile device, several groups\n  \
    kvsluice run --config run.toml --ranks 8         options from a file, one overridden\n\n\
    Exit codes: 0 all bytes matched and nothing leaked, 1 they did not, 2 wrong usage, 3 a process was lost,\n\
    4 refused, 130 interrupted and drained.")]
pub(crate) struct RunArgs {
    /// Name of the channel [default: run-PID]
    #[arg(long, value_name = "NAME", value_parser = channel_name, help_heading = "Channel")]
    channel: Option<ChannelName>,
    #[command(flatten)]
    place: ChannelArgs,
    #[command(flatten)]
    patience: PatienceArgs,
    #[command(flatten)]
    geometry: GeometryArgs,
    #[command(flatten)]
    segments: SegmentArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    verify: VerifyArgs,
    /// Print the result as one JSON object, the last line of standard output
    #[arg(long)]
    json: bool,
}

/// Runs the pair and prints what came of it.
pub(crate) fn run(args: &RunArgs, matches: &ArgMatches) -> anyhow::Result<Exit> {
    // Before any process is started, so that what cannot be used is said once.
    let geometry = args.geometry.geometry()?;
    args.segments.ring(&geometry)?;
    args.workload.options(args.verify.verify, &geometry)?;
    args.workload.trace()?;
    let channel = match &args.channel {
        Some(name) => name.clone(),
        None => ChannelName::new(&format!("run-{}", std::process::id()))?,
    };
    let watched = Supervisor::start(&channel, geometry.ranks, matches).and_then(Supervisor::watch);
    // Also after an error: by now every process has ended, and nothing is left behind (X27).
    clean::after_run(args.place.runtime_dir.as_deref(), &channel)?;
    report(watched?, args)
}

fn report(ending: Ending, args: &RunArgs) -> anyhow::Result<Exit> {
    let Some(produced) = ending.produced else {
        return ending.exit.context("the producer ended without a summary");
    };
    let of_rank = |(role, pid): (&Role, &u32)| matches!(role, Role::Rank(_)).then_some(*pid);
    let pids = Pids {
        producer: ending.pids.get(&Role::Producer).copied().unwrap_or_default(),
        workers: ending.pids.iter().filter_map(of_rank).collect(),
    };
    let workers: Vec<_> = ending.worked.into_values().collect();
    let report = Report::new(produced, &workers, pids);
    let faults = report.faults(args.verify.verify);
    for fault in &faults {
        eprintln!("kvsluice: {fault}");
    }
    if args.json {
        print(serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(ending
        .exit
        .unwrap_or(if faults.is_empty() { Exit::Good } else { Exit::Wrong }))
}
