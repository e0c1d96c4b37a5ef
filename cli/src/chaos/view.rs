//! The live view: kills, restarts and recoveries, on standard error, and only where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::tally::Tally;

/// One line that changes.
#[derive(Debug)]
pub(super) struct View {
    bar: ProgressBar,
}

impl View {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar }
    }

    /// Shows where things stand, and the last thing that happened.
    pub(super) fn show(&self, tally: &Tally, last: &str) {
        self.bar.set_message(format!(
            "{} kills, {} restarts, {} takeovers, {} recoveries, {} faults; {last}",
            tally.kills(),
            tally.restarts,
            tally.takeovers,
            tally.recoveries(),
            tally.faults().len()
        ));
    }

    /// Prints a line above the view.
    pub(super) fn say(&self, line: &str) {
        self.bar.suspend(|| eprintln!("kvsluice: {line}"));
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
