//! On what was measured: a figure without its machine and its day means nothing.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

/// The machine, as it describes itself.
#[derive(Serialize)]
pub(super) struct Machine {
    /// Model name of the processor.
    pub(super) cpu: String,
    /// Cores that are online.
    pub(super) cores: usize,
    /// The two that were measured on: producer, worker.
    pub(super) pinned: [usize; 2],
    /// Kernel release.
    pub(super) kernel: String,
    /// True where the processor says that a hypervisor runs it.
    pub(super) virtual_machine: bool,
    /// Tasks that wanted to run in the minute before the measurement (load average).
    pub(super) load: f64,
    /// Wall clock at the start, UTC.
    pub(super) date: String,
    /// Version of this build.
    pub(super) version: &'static str,
    /// `release` or `debug`.
    pub(super) profile: &'static str,
}

impl Machine {
    pub(super) fn read(pinned: [usize; 2]) -> Result<Self> {
        let info = std::fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
        let field = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let seconds = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_secs();
        Ok(Self {
            cpu: field("model name")
                .or_else(|| field("CPU part"))
                .unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            pinned,
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            virtual_machine: field("flags").is_some_and(|flags| flags.split(' ').any(|f| f == "hypervisor")),
            load: load
                .split(' ')
                .next()
                .and_then(|first| first.parse().ok())
                .unwrap_or(0.0),
            date: utc(seconds),
            version: env!("CARGO_PKG_VERSION"),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
        })
    }
}

/// Seconds since 1970 as `YYYY-MM-DDThh:mm:ssZ`. The calendar is Howard Hinnant's `civil_from_days`.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153; // months from March
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The cores that this process may run on.
pub(super) fn allowed_cores() -> Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0)).context("cannot read the allowed cores")?;
    Ok((0..CpuSet::count())
        .filter(|core| set.is_set(*core).unwrap_or(false))
        .collect())
}

/// Binds this thread to these cores.
pub(super) fn pin(cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for core in cores {
        set.set(*core)?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot pin to cores {cores:?}"))
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_796_042_367), "2026-11-30T12:39:27Z");
    }
}
