//! What goes to the standard output, whose reader may have seen enough.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stdout};

/// Prints a text and a line's end. A reader that is gone (`| head`) is no error.
///
/// # Errors
/// The system's error, as of a full disk.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    match writeln!(stdout().lock(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
