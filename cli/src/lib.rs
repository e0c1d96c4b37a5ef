//! The `kvsluice` binary: arguments, wiring, printing. It decides nothing.
//!
//! It is a library with one function so that the whole-system tests can build the same program with the planted faults
//! compiled in.

mod bench;
mod chaos;
mod clean;
mod compare;
mod config;
mod cpu_worker;
mod crew;
mod doctor;
mod eval;
mod exit;
mod forward;
mod gpu_worker;
mod inspect;
mod options;
mod print;
mod progress;
mod report;
mod run;
mod side;
mod sim;
mod supervisor;

use std::ffi::OsString;
use std::io::{IsTerminal, stderr};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use exit::{Exit, usage};

/// Moves KV-cache blocks between a CPU process and the GPU workers of one host, through pinned shared memory.
#[derive(Parser)]
#[command(name = "kvsluice", version, args_override_self = true, max_term_width = 120)]
#[command(
    after_help = "Exit codes: 0 all bytes matched and nothing leaked, 1 they did not, 2 wrong usage, \
    3 a process was lost, 4 refused, 130 interrupted.\nRUST_LOG sets what is logged on standard error, \
    for example RUST_LOG=kvsluice=debug."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the pair on this machine: one producer, a worker per rank, every byte checked
    Run(Box<run::RunArgs>),
    /// Be the producer of a channel: decide what moves, and publish it
    CpuWorker(Box<cpu_worker::CpuWorkerArgs>),
    /// Serve one rank of a channel: copy what the plans say onto the device
    GpuWorker(gpu_worker::GpuWorkerArgs),
    /// Kill the processes of a running pair again and again, and see that nothing is lost
    Chaos(Box<chaos::ChaosArgs>),
    /// Measure the transport on this machine
    Bench(bench::BenchArgs),
    /// Bring and keep one selection in every way, and compare what attention finds
    Compare(compare::CompareArgs),
    /// List channels, and remove what dead processes left behind
    Clean(clean::CleanArgs),
    /// Show a channel from outside: header, capability, journal, leases, who lives
    Inspect(inspect::InspectArgs),
    /// Say what on this host would stand in the way of a run, and what to change
    Doctor(doctor::DoctorArgs),
    /// Play a channel under one seeded scheduler, with crashes, and check it after every step
    Sim(sim::SimArgs),
    /// Answer conformance vectors: one JSON object a line in, one out
    Eval(eval::EvalArgs),
}

/// Runs the program that the command line asks for.
pub fn main() -> ExitCode {
    let level = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(level)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .init();
    match obey(std::env::args_os().collect()) {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("kvsluice: {}", exit::message(&error));
            exit::of_error(&error).into()
        }
    }
}

fn obey(args: Vec<OsString>) -> anyhow::Result<Exit> {
    let mut command = Cli::command();
    let args = config::with_config(args, &command).map_err(usage)?;
    let matches = command.clone().get_matches_from(args);
    let cli = Cli::from_arg_matches(&matches)
        .map_err(|error| error.format(&mut command))
        .map_err(usage)?;
    let options = matches.subcommand().map_or(&matches, |(_, options)| options);
    match cli.command {
        Command::Run(args) => run::run(&args, options),
        Command::CpuWorker(args) => cpu_worker::cpu_worker(&args),
        Command::GpuWorker(args) => gpu_worker::gpu_worker(&args),
        Command::Chaos(args) => chaos::chaos(&args, options),
        Command::Bench(args) => bench::run(&args).map(|()| Exit::Good),
        Command::Compare(args) => compare::run(&args),
        Command::Clean(args) => clean::run(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Sim(args) => sim::run(&args).map(|sound| if sound { Exit::Good } else { Exit::Wrong }),
        Command::Eval(args) => eval::eval(&args),
    }
}
