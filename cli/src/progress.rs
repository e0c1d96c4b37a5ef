//! The live view of a run, on standard error, and only where that is a terminal.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use kvsluice_transport::names::Role;

/// Requests played, bytes verified, and how fast.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    verified: BTreeMap<Role, u64>,
    began: Instant,
}

impl Progress {
    /// A view that shows nothing yet.
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} requests  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(250));
        Self {
            bar,
            verified: BTreeMap::new(),
            began: Instant::now(),
        }
    }

    /// How many requests have ended, of how many where that is known.
    pub(crate) fn requests(&self, ended: u64, total: Option<u64>) {
        self.bar.set_length(total.unwrap_or(ended));
        self.bar.set_position(ended);
    }

    /// How many bytes a worker has compared.
    pub(crate) fn verified(&mut self, role: Role, bytes: u64) {
        self.verified.insert(role, bytes);
        let bytes: u64 = self.verified.values().sum();
        let speed = bytes as f64 / self.began.elapsed().as_secs_f64().max(0.001);
        let (bytes, speed) = (BinaryBytes(bytes), BinaryBytes(speed as u64));
        self.bar.set_message(format!("{bytes} verified, {speed}/s"));
    }

    /// Prints a line above the view.
    pub(crate) fn say(&self, line: &str) {
        self.bar.suspend(|| eprintln!("kvsluice: {line}"));
    }

    /// Takes the view away.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
