//! How the binary ends: its exit codes, and errors that carry one.

use std::process::ExitCode;

/// What the exit code says. The numbers are part of the interface: see `docs/operation.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// All is well: every byte matched, nothing leaked.
    Good,
    /// The work was done and found to be wrong: bytes that do not match, blocks that leaked, a check that failed.
    Wrong,
    /// The command line, the configuration file, the geometry or the trace cannot be used. `clap` uses this number as well.
    Usage,
    /// A process of the channel was lost.
    Lost,
    /// The work could not be done: the system or the other side refused.
    Refused,
    /// A signal asked for the end, and all was drained. 128 + SIGINT, as shells expect.
    Interrupted,
}

impl Exit {
    /// The number.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Good => 0,
            Self::Wrong => 1,
            Self::Usage => 2,
            Self::Lost => 3,
            Self::Refused => 4,
            Self::Interrupted => 130,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// An error that asks for an exit other than [`Exit::Refused`].
#[derive(Debug, thiserror::Error)]
#[error("{}", message(.error))]
struct Marked {
    exit: Exit,
    error: anyhow::Error,
}

/// Marks an error as one of the command line, the configuration file, the geometry or the trace.
pub(crate) fn usage(error: impl Into<anyhow::Error>) -> anyhow::Error {
    let (exit, error) = (Exit::Usage, error.into());
    Marked { exit, error }.into()
}

/// Marks an error as the loss of a process.
pub(crate) fn lost(error: impl Into<anyhow::Error>) -> anyhow::Error {
    let (exit, error) = (Exit::Lost, error.into());
    Marked { exit, error }.into()
}

/// The exit that an error asks for.
pub(crate) fn of_error(error: &anyhow::Error) -> Exit {
    error
        .downcast_ref::<Marked>()
        .map_or(Exit::Refused, |marked| marked.exit)
}

/// An error and its causes, without those that a message above them names already.
pub(crate) fn message(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.as_str() {
            "" => cause,
            above if above.contains(&cause) => said,
            above => format!("{above}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn every_cause_is_named_once() {
        let cause = || Err::<(), _>(anyhow::anyhow!("no such file"));
        let above = cause().context("cannot open x").unwrap_err();
        assert_eq!(message(&above), "cannot open x: no such file");
        let within = cause().context("cannot open x: no such file; make it").unwrap_err();
        assert_eq!(message(&within), "cannot open x: no such file; make it");
        assert_eq!(message(&usage(within)), "cannot open x: no such file; make it");
    }
}
