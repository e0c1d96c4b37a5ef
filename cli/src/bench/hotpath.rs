//! P8: heap allocations and system calls per plan in steady state, while both sides are busy.
//!
//! Allocations are counted by the allocator of each process. System calls are counted by tracing: this process traces a
//! producer and its worker (ptrace, every entry into the kernel is a stop), and the two raise a signal, which only the
//! tracer sees, before and after the steady state. What the frame itself costs in calls (the signals, the orders, the
//! reading of the counters) is counted around an empty run of the same frame and taken off.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options as Trace};
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::link::{Order, Pair};
use super::plans::Plans;
use super::report::Figure;
use super::{Setup, allocations, throughput};

const PLANS: u64 = 200_000;
const MARKER: Signal = Signal::SIGUSR1;

/// What the traced producer says at its end.
#[derive(Serialize, Deserialize)]
struct Busy {
    allocations: u64,
    worker_allocations: u64,
}

/// Measures both counts.
pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let [producer_core, worker_core] = setup.cores;
    let mut busy = Command::new(std::env::current_exe()?)
        .args(["bench", "busy", "--ring-kib", &(setup.ring_bytes / 1024).to_string()])
        .args(["--cores", &format!("{producer_core},{worker_core}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the busy producer")?;
    let pid = Pid::from_raw(busy.id() as i32);
    let follow = Trace::PTRACE_O_TRACESYSGOOD
        | Trace::PTRACE_O_TRACEFORK
        | Trace::PTRACE_O_TRACEVFORK
        | Trace::PTRACE_O_TRACECLONE
        | Trace::PTRACE_O_TRACEEXEC
        | Trace::PTRACE_O_EXITKILL;
    ptrace::seize(pid, follow).context("cannot trace the busy producer: run as its user, with ptrace allowed")?;
    ptrace::interrupt(pid)?;
    let mut start = busy.stdin.take().context("no standard input")?;
    start.write_all(b"go\n")?; // It waits for this line: everything after it is traced.
    let calls = count_calls(pid)?;
    let mut said = String::new();
    BufReader::new(busy.stdout.take().context("no standard output")?).read_to_string(&mut said)?;
    let said: Busy = serde_json::from_str(&said).context("the busy producer said nothing")?;

    let per_plan = |count: u64| count as f64 / PLANS as f64;
    let all = said.allocations + said.worker_allocations;
    let allocations = Figure::new(
        "P8",
        "heap allocations per plan, both sides",
        per_plan(all),
        "allocations",
    )
    .at_most(0.0)
    .with("plans", PLANS)
    .with("producer", said.allocations)
    .with("worker", said.worker_allocations);
    let [producer, worker] = calls;
    let calls = Figure::new(
        "P8",
        "system calls per plan, both sides",
        per_plan(producer + worker),
        "calls",
    )
    .at_most(0.0)
    .with("plans", PLANS)
    .with("producer", producer)
    .with("worker", worker);
    Ok(vec![allocations, calls])
}

/// Marks a moment for the tracer.
pub(super) fn mark() {
    // Without a tracer the signal would end this process: only `busy` and its peer come here.
    let _ = raise(MARKER);
}

/// The traced producer.
pub(super) fn busy(setup: &Setup) -> Result<()> {
    std::io::stdin().lock().read_line(&mut String::new())?;
    let mut pair = Pair::start(setup)?;
    let mut plans = Plans::new(b"request0", 1, 1);
    let mut said = Busy {
        allocations: 0,
        worker_allocations: 0,
    };
    // A warm-up, an empty frame, and the steady state, in frames that differ in nothing but the number of plans.
    mark_both(&mut pair)?;
    for count in [PLANS / 10, 0, PLANS] {
        pair.link.order(Order::Answer, count, 0);
        let before = allocations::count();
        throughput::stream(&mut pair, &mut plans, count)?;
        let after = allocations::count();
        pair.link.settle()?;
        said = Busy {
            allocations: after - before,
            worker_allocations: pair.link.peer_allocations(),
        };
        mark_both(&mut pair)?;
    }
    println!("{}", serde_json::to_string(&said)?);
    Ok(())
}

fn mark_both(pair: &mut Pair) -> Result<()> {
    pair.link.order(Order::Mark, 1, 0);
    pair.link.settle()?;
    mark();
    Ok(())
}

#[derive(Default)]
struct Traced {
    stops: u64,
    marks: Vec<u64>,
}

impl Traced {
    /// Calls of the last frame less those of the empty one before it. Each call stops twice, at entry and at exit.
    fn steady_calls(&self) -> Option<u64> {
        let [_, warm, empty, steady] = self.marks[..] else {
            return None;
        };
        Some((steady - empty).saturating_sub(empty - warm) / 2)
    }
}

/// Follows the producer and its worker to their end. Returns the system calls of each in the steady state.
fn count_calls(producer: Pid) -> Result<[u64; 2]> {
    let mut traced: HashMap<Pid, Traced> = HashMap::new();
    let failed = loop {
        let status = match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Err(Errno::ECHILD) => break false,
            status => status?,
        };
        let (pid, signal) = match status {
            WaitStatus::PtraceSyscall(pid) => {
                traced.entry(pid).or_default().stops += 1;
                (pid, None)
            }
            WaitStatus::Stopped(pid, MARKER) => {
                let process = traced.entry(pid).or_default();
                process.marks.push(process.stops);
                (pid, None)
            }
            // The first stop of a process that is traced from its birth.
            WaitStatus::Stopped(pid, Signal::SIGSTOP | Signal::SIGTRAP) => (pid, None),
            WaitStatus::Stopped(pid, signal) => (pid, Some(signal)),
            WaitStatus::PtraceEvent(pid, ..) => (pid, None),
            WaitStatus::Exited(pid, code) if pid == producer => break code != 0,
            WaitStatus::Signaled(pid, ..) if pid == producer => break true,
            _ => continue,
        };
        match ptrace::syscall(pid, signal) {
            Ok(()) | Err(Errno::ESRCH) => {} // Gone between its stop and now.
            Err(error) => return Err(error.into()),
        }
    };
    if failed {
        bail!("the busy producer failed");
    }
    let calls = |pid: &Pid| traced.get(pid).and_then(Traced::steady_calls);
    let worker = traced
        .iter()
        .find(|(pid, process)| **pid != producer && !process.marks.is_empty());
    let worker = worker.map(|(pid, _)| *pid).context("no worker was traced")?;
    let missing = "a marker is missing";
    Ok([calls(&producer).context(missing)?, calls(&worker).context(missing)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_calls_of_the_frame_itself_are_taken_off() {
        let process = Traced {
            stops: 0,
            marks: vec![10, 30, 44, 64],
        };
        assert_eq!(process.steady_calls(), Some(3));
        assert_eq!(
            Traced {
                stops: 0,
                marks: vec![1, 2]
            }
            .steady_calls(),
            None
        );
    }
}
