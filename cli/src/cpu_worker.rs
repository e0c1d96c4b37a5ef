//! `kvsluice cpu-worker`: the producer of a channel.

use clap::Args;
use kvsluice_cpu_worker::process::{Event, OnRankLost, ProcessError, ProducerOptions, run_producer};
use kvsluice_transport::names::ChannelName;

use crate::exit::{Exit, lost};
use crate::options::{ChannelArgs, GeometryArgs, PatienceArgs, SegmentArgs, VerifyArgs, WorkloadArgs, channel_name};
use crate::side::{Side, SideArgs};

/// Options of `cpu-worker`.
#[derive(Args, Debug)]
#[command(after_help = "Examples, in two terminals:\n  \
    kvsluice cpu-worker --channel demo --ranks 1 --trace conversation.jsonl\n  \
    kvsluice gpu-worker --channel demo --ranks 1 --rank 0\n\n\
    The two sides may be started in any order; their geometry options must be equal. Ctrl-C drains.")]
pub(crate) struct CpuWorkerArgs {
    /// Name of the channel
    #[arg(long, value_name = "NAME", value_parser = channel_name, help_heading = "Channel")]
    channel: ChannelName,
    #[command(flatten)]
    place: ChannelArgs,
    #[command(flatten)]
    geometry: GeometryArgs,
    #[command(flatten)]
    segments: SegmentArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    verify: VerifyArgs,
    /// Let a new worker take the place of one that died, instead of ending
    #[arg(long, help_heading = "Channel")]
    wait_for_ranks: bool,
    #[command(flatten)]
    patience: PatienceArgs,
    #[command(flatten)]
    side: SideArgs,
}

/// Plays the workload until it is over or the process is stopped.
pub(crate) fn cpu_worker(args: &CpuWorkerArgs) -> anyhow::Result<Exit> {
    let side = Side::new(&args.side)?;
    let geometry = args.geometry.geometry()?;
    let workload = args.workload.options(args.verify.verify, &geometry)?;
    let options = ProducerOptions {
        runtime_dir: args.place.runtime_dir.clone(),
        allowed_uids: args.side.allow_uid.clone(),
        ring_bytes: args.segments.ring(&geometry)?,
        residence: args.segments.residence(),
        attach_patience_ms: args.side.attach_patience().as_millis() as u64,
        expel_after_ms: args.patience.expel_after_ms,
        on_rank_lost: if args.wait_for_ranks {
            OnRankLost::Wait
        } else {
            OnRankLost::Fail
        },
        trace: args.workload.trace()?,
        workload,
        rounds_log: args.workload.rounds_log.clone(),
        ..ProducerOptions::new(args.channel.as_str(), geometry)
    };
    match run_producer(&options, side.stop(), &mut |event| side.tell(&event, tell)) {
        Ok(summary) if summary.leaked_blocks == 0 => Ok(Exit::Good),
        Ok(_) => Ok(Exit::Wrong),
        Err(error @ ProcessError::RankLost { .. }) => Err(lost(error)),
        Err(error) => Err(error.into()),
    }
}

/// For a person at the terminal.
fn tell(event: &Event) -> Option<String> {
    match event {
        Event::Ready { pid, channel, .. } => Some(format!("channel {channel} is open, the producer is pid {pid}")),
        Event::Attached { rank, pid } => Some(format!("rank {rank} (pid {pid}) takes part")),
        Event::Refused { rank, pid, reason } => Some(format!("rank {rank} (pid {pid}) does not fit: {reason}")),
        Event::Recovered {
            incarnation,
            ranks,
            in_flight,
            warm_blocks,
            adopted,
            resumed_requests,
            begun_again_requests,
            ..
        } => Some(format!(
            "took the channel over as incarnation {incarnation}: workers {ranks:?} live, {in_flight} records in flight, \
             {warm_blocks} blocks warm, {}",
            match adopted {
                true => format!(
                    "{resumed_requests} requests go on with what the devices hold, {begun_again_requests} begin again"
                ),
                false => "the device pools are reset".to_owned(),
            }
        )),
        Event::Progress { .. } | Event::Resumed { .. } => None,
        Event::RankLost { rank, pid } => Some(format!("RankLost: rank {rank}, pid {pid}")),
        Event::Summary(summary) => Some(format!(
            "{} requests, {} plans, {} rows, {} ids, {} blocks leaked",
            summary.requests, summary.plans, summary.rows, summary.ids, summary.leaked_blocks
        )),
    }
}
