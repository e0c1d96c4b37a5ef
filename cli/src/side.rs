//! What both sides of a channel share as processes: when they stop, to whom they talk, and on whose life they depend.

use std::io::{Write, stdout};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::crew::die_with;
use crate::exit::Exit;

/// What both sides are started with, by `kvsluice run` or by hand.
#[derive(Args, Debug)]
pub(crate) struct SideArgs {
    /// Milliseconds to wait for the other side at start
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Channel")]
    attach_patience_ms: u64,
    /// Users besides this one who may take part; both sides and --runtime-dir must let the other user in
    #[arg(long, value_name = "UID[,UID]", value_delimiter = ',', help_heading = "Channel")]
    pub(crate) allow_uid: Vec<u32>,
    /// Say events as JSON lines on standard output
    #[arg(long, value_enum, default_value_t = Events::Text, hide = true)]
    events: Events,
    /// The process that started this one, and whose death ends it
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<u32>,
}

impl SideArgs {
    /// How long to wait for the other side at start.
    pub(crate) fn attach_patience(&self) -> Duration {
        Duration::from_millis(self.attach_patience_ms)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Events {
    Text,
    Json,
}

/// A side as a process.
#[derive(Debug)]
pub(crate) struct Side {
    events: Events,
    stop: Arc<AtomicBool>,
}

impl Side {
    /// Binds the process to its parent, if it has one, and catches the signals that ask it to drain. By hand, the second
    /// one ends the process at once; a parent that has no more patience kills.
    pub(crate) fn new(args: &SideArgs) -> anyhow::Result<Self> {
        const CANNOT: &str = "cannot catch signals";
        let stop = Arc::new(AtomicBool::new(false));
        if let Some(parent) = args.parent {
            // Ctrl-C reaches every process of the terminal, but the parent decides in which order they drain.
            flag::register(SIGINT, Arc::new(AtomicBool::new(false))).context(CANNOT)?;
            flag::register(SIGTERM, Arc::clone(&stop)).context(CANNOT)?;
            die_with(parent)?;
        } else {
            for signal in [SIGINT, SIGTERM] {
                // In this order: the first signal finds the flag unset.
                let again = i32::from(Exit::Interrupted.code());
                flag::register_conditional_shutdown(signal, again, Arc::clone(&stop)).context(CANNOT)?;
                flag::register(signal, Arc::clone(&stop)).context(CANNOT)?;
            }
        }
        Ok(Self {
            events: args.events,
            stop,
        })
    }

    /// Set once the process is asked to drain and end.
    pub(crate) fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// Tells an event: the whole of it to `kvsluice run`, in the words of `text` to a person.
    pub(crate) fn tell<E: Serialize>(&self, event: &E, text: impl FnOnce(&E) -> Option<String>) {
        let line = match self.events {
            Events::Json => serde_json::to_string(event).ok(),
            Events::Text => text(event),
        };
        let Some(line) = line else { return };
        let mut out = stdout().lock();
        // Nobody may be reading any more; the work goes on all the same.
        if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
            tracing::debug!(%error, "an event could not be told");
        }
    }
}
