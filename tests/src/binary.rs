//! The `kvsluice` binary as the tests start it: the same program, with the planted faults compiled in.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvsluice_cli::main()
}
