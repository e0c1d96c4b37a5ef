//! `kvsluice chaos`: a running pair whose processes are killed and stopped at random instants and at named points, and
//! started again, while every byte is verified (X22–X27).

mod arena;
mod strike;
mod tally;
mod view;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Args, ValueEnum};
use kvsluice_cpu_worker::process::Residence;
use kvsluice_transport::names::ChannelName;

use crate::clean;
use crate::exit::Exit;
use crate::options::{ChannelArgs, DeviceArgs, GeometryArgs, SegmentArgs, VerifyArgs, WorkloadArgs};
use crate::print::print;
use arena::Arena;
pub(crate) use arena::Plan;
pub(crate) use tally::{Recovery, Tally};

/// Options of `chaos`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    kvsluice chaos --seconds 60 --seed 7 --kill both\n  \
    kvsluice chaos --kill producer --ranks 4 --json\n\n\
    Exit codes: 0 nothing was lost, applied twice, reused early, leaked or left behind; 1 something was; 2 wrong usage.\n\
    A seed repeats the choices; what the processes were doing at those instants is up to the machine.")]
pub(crate) struct ChaosArgs {
    /// How long to go on
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    seconds: f64,
    /// End earlier, after so many kills
    #[arg(long, value_name = "N")]
    kills: Option<u64>,
    /// Which side is killed
    #[arg(long, value_enum, default_value_t = Target::Both)]
    kill: Target,
    /// Print the result as one JSON object, the last line of standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: ChannelArgs,
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
}

/// What `--kill` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// The producer.
    Producer,
    /// Workers, one at a time.
    Worker,
    /// Either, and now and then several at once.
    Both,
}

/// Kills and restarts for a while, and prints what came of it.
pub(crate) fn chaos(args: &ChaosArgs, matches: &ArgMatches) -> anyhow::Result<Exit> {
    let geometry = args.geometry.geometry()?;
    args.segments.ring(&geometry)?;
    args.workload.options(args.verify.verify, &geometry)?;
    args.workload.trace()?;
    let plan = Plan {
        target: args.kill,
        seed: args.workload.seed,
        length: Duration::try_from_secs_f64(args.seconds)
            .context("--seconds")
            .map_err(crate::exit::usage)?,
        kills_max: args.kills.unwrap_or(u64::MAX),
        ranks: geometry.ranks,
        warm: args.segments.residence() != Residence::Hardened,
        always_calm: false,
    };
    let runtime_dir = args.place.runtime_dir.clone();
    let tally = run(&plan, runtime_dir, &|command| crate::forward::forward(matches, command))?;
    for fault in tally.faults() {
        eprintln!("kvsluice: {fault}");
    }
    if args.json {
        print(serde_json::to_string(&tally.report())?)?;
    } else {
        print(&tally)?;
    }
    Ok(if tally.faults().is_empty() {
        Exit::Good
    } else {
        Exit::Wrong
    })
}

/// Carries a plan out in a runtime folder, by default one of its own. `options` are what each side is started with.
pub(crate) fn run(
    plan: &Plan,
    runtime_dir: Option<PathBuf>,
    options: &dyn Fn(&str) -> Vec<std::ffi::OsString>,
) -> anyhow::Result<Tally> {
    let own = std::env::temp_dir().join(format!("kvsluice-chaos-{}", std::process::id()));
    let folder = runtime_dir.clone().unwrap_or_else(|| own.clone());
    let channel = ChannelName::new(&format!("chaos-{}", std::process::id()))?;
    let tally = Arena::new(plan, &channel, &folder, options).and_then(Arena::fight);
    let tally = tally.and_then(|mut tally| {
        tally.stale_files = left_files(&folder, &channel)?;
        Ok(tally)
    });
    // Also after an error: by now every process has ended.
    clean::after_run(Some(&folder), &channel)?;
    if runtime_dir.is_none() {
        std::fs::remove_dir(&own).with_context(|| format!("cannot remove {}", own.display()))?;
    }
    tally
}

/// Files of the channel in the runtime folder and in /dev/shm, after every process has ended (X27).
fn left_files(folder: &std::path::Path, channel: &ChannelName) -> anyhow::Result<u64> {
    let of_channel = folder.join(channel.as_str());
    let in_runtime = match std::fs::read_dir(&of_channel) {
        Ok(entries) => entries.count() as u64,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", of_channel.display())),
    };
    let shm = std::fs::read_dir("/dev/shm").context("cannot read /dev/shm")?;
    let ours = shm
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().contains(channel.as_str()));
    Ok(in_runtime + ours.count() as u64)
}
