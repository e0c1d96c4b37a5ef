//! `kvsluice inspect`: what a channel looks like from outside, live or dead.

use std::path::PathBuf;

use clap::Args;
use kvsluice_transport::inspect::{InspectError, Target, inspect as look};
use kvsluice_transport::runtime_dir::RuntimeDir;

use crate::exit::{Exit, usage};
use crate::print::print;

/// Options of `inspect`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    kvsluice inspect demo             a channel of the runtime folder\n  \
    kvsluice inspect /dev/shm/kv      the persistent channel of that folder, also when everybody is dead\n  \
    kvsluice inspect demo --json | jq '.control.journal[] | select(.ranks[].state == \"open\")'\n\n\
    Nothing is mapped, locked or written: a live channel does not notice.")]
pub(crate) struct InspectArgs {
    /// Name of a channel, or path of a persistent one: its folder or its NAME.control
    #[arg(value_name = "CHANNEL|PATH")]
    target: String,
    /// Folder for sockets and locks [default: as for run]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Looks at a channel and prints what is there.
pub(crate) fn inspect(args: &InspectArgs) -> anyhow::Result<Exit> {
    let runtime = RuntimeDir::choose(args.runtime_dir.as_deref());
    let target = Target::of(&args.target, &runtime).map_err(usage)?;
    let found = look(&target).map_err(|error| match error {
        InspectError::Path { .. } | InspectError::Name(_) => usage(error),
        error => error.into(),
    })?;
    if args.json {
        print(serde_json::to_string(&found)?)?;
    } else {
        print(found.to_string().trim_end())?;
    }
    Ok(Exit::Good)
}
