//! The `kvsluice` binary. See the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvsluice_cli::main()
}
