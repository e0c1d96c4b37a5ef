//! The `kvsluice` binary.

mod bench;
mod compare;

use clap::{Parser, Subcommand};

/// Moves KV-cache blocks between a CPU worker and the GPU workers of one host.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures the transport on this machine
    Bench(bench::BenchArgs),
    /// Bring and keep one selection in every way, and compare what attention finds
    Compare(compare::CompareArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Compare(args) => match compare::run(&args)? {
            true => Ok(()),
            false => std::process::exit(1),
        },
    }
}
