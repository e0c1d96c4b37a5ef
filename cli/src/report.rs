//! What a run came to: the parts that the processes tell, and the whole that `run` prints.

use std::fmt;

use kvsluice_cpu_worker::process::Summary;
use serde::Serialize;

use crate::options::Verify;

/// What a worker did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Worked {
    pub(crate) device: String,
    pub(crate) bytes_h2d: u64,
    pub(crate) verified_bytes: u64,
    pub(crate) verified_table_bytes: u64,
    pub(crate) mismatched_bytes: u64,
}

/// The processes of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pids {
    pub(crate) producer: u32,
    pub(crate) workers: Vec<u32>,
}

/// A run as a whole: the object that `run --json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    produced: Summary,
    verified_bytes: u64,
    verified_table_bytes: u64,
    mismatched_bytes: u64,
    ranks: usize,
    device: String,
    gib_per_s: f64,
    pids: Pids,
}

impl Report {
    /// The whole from its parts, workers in the order of their ranks.
    pub(crate) fn new(mut produced: Summary, workers: &[Worked], pids: Pids) -> Self {
        // The producer knows of the rounds that ended; the devices know what they copied.
        produced.bytes_h2d = workers.iter().map(|worker| worker.bytes_h2d).sum();
        let gib = produced.bytes_h2d as f64 / f64::from(1 << 30);
        Self {
            verified_bytes: workers.iter().map(|worker| worker.verified_bytes).sum(),
            verified_table_bytes: workers.iter().map(|worker| worker.verified_table_bytes).sum(),
            mismatched_bytes: workers.iter().map(|worker| worker.mismatched_bytes).sum(),
            ranks: workers.len(),
            device: workers.first().map(|worker| worker.device.clone()).unwrap_or_default(),
            gib_per_s: if produced.wall_s > 0.0 {
                gib / produced.wall_s
            } else {
                0.0
            },
            pids,
            produced,
        }
    }

    /// What is wrong with the run, in words; empty if nothing is.
    pub(crate) fn faults(&self, verify: Verify) -> Vec<String> {
        let mut faults = Vec::new();
        if self.mismatched_bytes > 0 {
            faults.push(format!(
                "{} bytes on the device are not what they must be",
                self.mismatched_bytes
            ));
        }
        if self.produced.leaked_blocks > 0 {
            faults.push(format!("{} blocks leaked", self.produced.leaked_blocks));
        }
        let broken = self.produced.completions.failed + self.produced.completions.rejected;
        if broken > 0 {
            faults.push(format!("{broken} operations failed or were rejected"));
        }
        if verify == Verify::Full && self.verified_bytes < self.produced.bytes_h2d {
            let (verified, moved) = (self.verified_bytes, self.produced.bytes_h2d);
            faults.push(format!("only {verified} of {moved} bytes moved were verified"));
        }
        faults
    }
}

/// For people: a few lines.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let latency = self.produced.latency_us.publish_to_done;
        let done = &self.produced.completions;
        writeln!(
            f,
            "requests    {} of {}",
            self.produced.requests, self.produced.trace.file
        )?;
        writeln!(
            f,
            "plans       {} with {} rows, {} block ids",
            self.produced.plans, self.produced.rows, self.produced.ids
        )?;
        writeln!(
            f,
            "moved       {} to {} ranks on {} in {:.2} s ({:.2} GiB/s)",
            indicatif::BinaryBytes(self.produced.bytes_h2d),
            self.ranks,
            self.device,
            self.produced.wall_s,
            self.gib_per_s
        )?;
        writeln!(
            f,
            "verified    {}, and {} through the tables, {} bytes wrong, {} blocks leaked",
            indicatif::BinaryBytes(self.verified_bytes),
            indicatif::BinaryBytes(self.verified_table_bytes),
            self.mismatched_bytes,
            self.produced.leaked_blocks
        )?;
        writeln!(
            f,
            "completions {} done, {} failed, {} rejected, {} superseded, {} duplicate, {} stale",
            done.done, done.failed, done.rejected, done.superseded, done.duplicate, done.stale
        )?;
        write!(
            f,
            "latency     publish to done p50 {:.0} us, p99 {:.0} us, p99.9 {:.0} us",
            latency.p50, latency.p99, latency.p999
        )
    }
}
