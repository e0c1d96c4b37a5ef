//! `kvsluice clean`: lists the channels of a runtime folder, and removes what dead processes left (X27).

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use kvsluice_gpu_worker::process::random_epoch;
use kvsluice_transport::clean::{Cleaned, clean, list};
use kvsluice_transport::names::ChannelName;
use kvsluice_transport::peers::Peers;
use kvsluice_transport::runtime_dir::RuntimeDir;
use kvsluice_transport::segment::Persistent;

use crate::exit::{Exit, message};
use crate::options::channel_name;
use crate::print::print;

/// Options of `clean`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    kvsluice clean --list             what is there, and which processes are in it\n  \
    kvsluice clean                    remove every stale channel\n  \
    kvsluice clean demo --persist /dev/shm/demo\n\n\
    A channel that any process takes part in is never touched.")]
pub(crate) struct CleanArgs {
    /// Channels to clean [default: all]
    #[arg(value_name = "CHANNEL", value_parser = channel_name)]
    channels: Vec<ChannelName>,
    /// Folder for sockets and locks [default: as for run]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Remove the named segments in DIR as well
    #[arg(long, value_name = "DIR", requires = "channels")]
    persist: Option<PathBuf>,
    /// Users besides this one whose channels these are
    #[arg(long, value_name = "UID[,UID]", value_delimiter = ',')]
    allow_uid: Vec<u32>,
    /// Only list
    #[arg(long)]
    list: bool,
}

/// Lists or cleans.
pub(crate) fn run(args: &CleanArgs) -> anyhow::Result<Exit> {
    let runtime = open(args.runtime_dir.as_deref(), &args.allow_uid)?;
    if args.list {
        for found in list(&runtime)? {
            let state = if found.is_live() { "live" } else { "stale" };
            print(format_args!("{} is {state}", found.name))?;
            for (role, holder) in found.roles {
                let holder = holder.map_or_else(|| "nobody".to_owned(), |holder| holder.to_string());
                print(format_args!("  {role}: {holder}"))?;
            }
        }
        return Ok(Exit::Good);
    }
    let names = if args.channels.is_empty() {
        runtime.channels()?
    } else {
        args.channels.clone()
    };
    let mut exit = Exit::Good;
    for name in names {
        // One that cannot be cleaned keeps nobody from cleaning the others.
        match clean_one(&runtime, &name, args.persist.as_deref()) {
            Ok(Cleaned::Live { role, holder }) => print(format_args!("{name} is live: {role} is {holder}"))?,
            Ok(Cleaned::Removed { paths, folder_removed }) => {
                print(format_args!("{name} was stale"))?;
                for path in paths {
                    print(format_args!("  removed {}", path.display()))?;
                }
                if !folder_removed {
                    print("  its folder stays, because something else lies in it")?;
                }
            }
            Err(error) => {
                eprintln!("kvsluice: {}", message(&error));
                exit = Exit::Refused;
            }
        }
    }
    Ok(exit)
}

/// Removes what the channel of a `run` left, after all of its processes have ended.
pub(crate) fn after_run(runtime_dir: Option<&Path>, name: &ChannelName) -> anyhow::Result<()> {
    let runtime = open(runtime_dir, &[])?;
    if runtime.channels()?.contains(name)
        && let Cleaned::Live { role, holder } = clean_one(&runtime, name, None)?
    {
        tracing::warn!(channel = %name, %role, %holder, "somebody else takes part in the channel: its files stay");
    }
    Ok(())
}

fn open(runtime_dir: Option<&Path>, allowed: &[u32]) -> anyhow::Result<RuntimeDir> {
    let path = RuntimeDir::choose(runtime_dir);
    RuntimeDir::open(&path, &Peers::with(allowed.iter().copied()))
        .with_context(|| format!("runtime folder {}", path.display()))
}

fn clean_one(runtime: &RuntimeDir, name: &ChannelName, persist: Option<&Path>) -> anyhow::Result<Cleaned> {
    let named = persist
        .map(|folder| Persistent::open(folder, name.clone()))
        .transpose()?;
    clean(runtime, name, named.as_ref(), random_epoch()?).with_context(|| format!("channel {name}"))
}
