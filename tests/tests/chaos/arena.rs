//! One chaos run in a folder of its own, and what its account says.

use std::process::{Command, Stdio};

use serde_json::Value;

/// Everything that the account must show none of.
const FAULTS: [&str; 9] = [
    "lost_plans",
    "double_applied",
    "early_reuse",
    "leaked_blocks",
    "stale_files",
    "mismatched_bytes",
    "failed",
    "gave_up",
    "hangs",
];

/// How a chaos run ended.
#[derive(Debug)]
pub(crate) struct Ended {
    code: Option<i32>,
    /// Its JSON.
    pub(crate) report: Value,
    #[allow(dead_code, reason = "shown where a test fails")]
    log: String,
    left: usize,
}

/// Plays `kvsluice chaos` with `args`, with ordered deaths and planted faults, if any.
pub(crate) fn chaos(args: &[&str], die_at: &str, planted: &str) -> Ended {
    let folder = tempfile::tempdir().expect("folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsluice-under-test"));
    command.args(["chaos", "--json"]).args(args);
    command.arg("--runtime-dir").arg(folder.path());
    command.env("KVSLUICE_DIE_AT", die_at).env("KVSLUICE_PLANTED", planted);
    let ended = command.stdin(Stdio::null()).output().expect("chaos");
    let out = String::from_utf8_lossy(&ended.stdout);
    let report = out.lines().last().and_then(|line| serde_json::from_str(line).ok());
    Ended {
        code: ended.status.code(),
        report: report.unwrap_or_default(),
        log: String::from_utf8_lossy(&ended.stderr).into_owned(),
        left: std::fs::read_dir(folder.path()).expect("folder").count(),
    }
}

impl Ended {
    /// Processes killed.
    pub(crate) fn kills(&self) -> u64 {
        self.report["kills"].as_u64().unwrap_or_default()
    }

    /// True where the run says so with its exit code; panics where that is not what its account says.
    pub(crate) fn is_sound(&self) -> bool {
        let faults = FAULTS.iter().filter(|fault| self.report[**fault] != 0).count();
        assert_eq!(self.code, Some(i32::from(faults > 0)), "{self:?}");
        faults == 0
    }

    /// Panics unless everything balances and nothing is left.
    pub(crate) fn balances(&self) {
        assert!(self.is_sound(), "{self:?}");
        assert_eq!(self.left, 0, "files are left: {self:?}");
    }
}
