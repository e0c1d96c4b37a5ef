//! The `kvsluice` binary.

mod bench;

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
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
    }
}
