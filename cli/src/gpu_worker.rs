//! `kvsluice gpu-worker`: one rank of a channel.

use std::time::Duration;

use clap::Args;
use kvsluice_gpu_worker::process::{Event, WorkerOptions, run_worker};
use kvsluice_layout::ids::Rank;
use kvsluice_transport::names::ChannelName;

use crate::exit::{Exit, usage};
use crate::options::{ChannelArgs, DeviceArgs, GeometryArgs, VerifyArgs, channel_name};
use crate::side::{Side, SideArgs};

/// Options of `gpu-worker`.
#[derive(Args, Debug)]
#[command(after_help = "Examples, in two terminals:\n  \
    kvsluice cpu-worker --channel demo --ranks 1 --trace conversation.jsonl\n  \
    kvsluice gpu-worker --channel demo --ranks 1 --rank 0\n\n\
    The two sides may be started in any order; their geometry options must be equal. Ctrl-C drains.")]
pub(crate) struct GpuWorkerArgs {
    /// Name of the channel
    #[arg(long, value_name = "NAME", value_parser = channel_name, help_heading = "Channel")]
    channel: ChannelName,
    /// The rank of this worker, from 0
    #[arg(long, value_name = "RANK", help_heading = "Channel")]
    rank: u32,
    #[command(flatten)]
    place: ChannelArgs,
    #[command(flatten)]
    geometry: GeometryArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    verify: VerifyArgs,
    #[command(flatten)]
    side: SideArgs,
}

/// Serves the rank until it is stopped.
pub(crate) fn gpu_worker(args: &GpuWorkerArgs) -> anyhow::Result<Exit> {
    let side = Side::new(&args.side)?;
    let geometry = args.geometry.geometry()?;
    if args.rank >= geometry.ranks {
        let ranks = geometry.ranks;
        return Err(usage(anyhow::anyhow!(
            "--rank is {}, expected less than --ranks, which is {ranks}",
            args.rank
        )));
    }
    let options = WorkerOptions {
        channel: args.channel.to_string(),
        runtime_dir: args.place.runtime_dir.clone(),
        allowed_uids: args.side.allow_uid.clone(),
        rank: Rank(args.rank),
        geometry,
        copy_threads: args.device.copy_threads,
        adversary: args.device.adversary,
        verify: args.verify.verify.into(),
        chunk_bytes_max: args.device.pin_chunk_bytes,
        attach_patience: args.side.attach_patience(),
        watchdog: Duration::from_secs(args.device.watchdog_s),
        requests_max: args.device.requests_max,
    };
    let counts = run_worker(&options, side.stop(), &mut |event| side.tell(&event, tell))?;
    Ok(if counts.mismatched_bytes == 0 {
        Exit::Good
    } else {
        Exit::Wrong
    })
}

/// For a person at the terminal.
fn tell(event: &Event) -> Option<String> {
    match event {
        Event::Ready { pid, rank, device } => {
            Some(format!("rank {rank} (pid {pid}) is attached, its device is {device}"))
        }
        Event::Progress {
            rank, verified_bytes, ..
        } => {
            tracing::debug!("verified role={rank} bytes={verified_bytes}");
            None
        }
        Event::ProducerLost { rank, pid, .. } => Some(format!(
            "ProducerLost: pid {pid} died; rank {rank} goes on with what was published and waits for a new producer"
        )),
        Event::Adopted { rank, incarnation } => Some(format!(
            "rank {rank} works for a new producer, incarnation {incarnation}"
        )),
        Event::Drained { rank, reason } => Some(format!("rank {rank} gives its device up and attaches anew: {reason}")),
        Event::Summary {
            rank,
            operations,
            bytes_h2d,
            verified_bytes,
            mismatched_bytes,
            ..
        } => Some(format!(
            "rank {rank}: {operations} operations, {bytes_h2d} bytes to the device, {verified_bytes} verified, \
             {mismatched_bytes} wrong"
        )),
    }
}
