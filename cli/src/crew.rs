//! The processes that `run` starts: this binary again, once for each role.
//!
//! The kernel kills them when this process dies, whatever it dies of. Their end shows at once, as the end of their
//! standard output. Drop behaviour: what still runs is killed and waited for.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use kvsluice_cpu_worker::process::Event as ProducerEvent;
use kvsluice_gpu_worker::process::Event as WorkerEvent;
use kvsluice_transport::names::Role;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// What the crew's owner hears.
#[derive(Debug)]
pub(crate) enum News {
    /// The producer said something.
    Producer(ProducerEvent),
    /// The worker of a rank said something.
    Worker(Role, WorkerEvent),
    /// A process says nothing more: it has ended or is about to.
    Silent(Role),
    /// The user or the system asks for the end.
    Interrupted,
}

/// The processes, and where their news arrive.
#[derive(Debug)]
pub(crate) struct Crew {
    members: BTreeMap<Role, Child>,
    sender: Sender<News>,
    news: Receiver<News>,
}

impl Crew {
    /// No process yet. From here on SIGINT and SIGTERM are news.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let (sender, news) = channel();
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
        let interrupted = sender.clone();
        thread::spawn(move || {
            for _ in &mut signals {
                if interrupted.send(News::Interrupted).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            members: BTreeMap::new(),
            sender,
            news,
        })
    }

    /// Starts this binary with `args`, and with `variables` in its environment. From the main thread only: the kernel
    /// ties the child's life to the thread that started it.
    pub(crate) fn start(&mut self, role: Role, args: &[OsString], variables: &[(&str, String)]) -> anyhow::Result<u32> {
        // The link names the running file even where a new build has replaced it under its name.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("kvsluice").args(args);
        command.arg(format!("--parent={}", std::process::id()));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let mut child = command.spawn().with_context(|| format!("cannot start {role}"))?;
        let pid = child.id();
        if let Some(out) = child.stdout.take() {
            let sender = self.sender.clone();
            thread::spawn(move || listen(role, out, &sender));
        }
        self.members.insert(role, child);
        Ok(pid)
    }

    /// The next thing that happens; `None` once `deadline` has passed.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<News> {
        let Some(deadline) = deadline else {
            // Cannot fail: `self.sender` keeps the channel open.
            return self.news.recv().ok();
        };
        let patience = deadline.saturating_duration_since(Instant::now());
        self.news.recv_timeout(patience).ok()
    }

    /// Asks a process to drain and end.
    pub(crate) fn ask_to_end(&self, role: Role) {
        self.signal(role, Signal::TERM);
    }

    /// Sends a signal to a process; its pid, or `None` for one that is not of the crew.
    pub(crate) fn signal(&self, role: Role, signal: Signal) -> Option<u32> {
        let child = self.members.get(&role)?;
        // An error can only mean that it has ended: it is our child and not yet waited for, so the pid is its own.
        let _ = kill_process(Pid::from_raw(child.id() as i32)?, signal);
        Some(child.id())
    }

    /// Asks every process to drain and end.
    pub(crate) fn ask_all_to_end(&self) {
        for role in self.members.keys() {
            self.ask_to_end(*role);
        }
    }

    /// Ends every process at once.
    pub(crate) fn kill_all(&mut self) {
        for child in self.members.values_mut() {
            // It can only have ended already.
            let _ = child.kill();
        }
    }

    /// Waits for a process that has fallen silent; its pid, and how it ended. `None` for one that is not of the crew.
    pub(crate) fn bury(&mut self, role: Role) -> anyhow::Result<Option<(u32, ExitStatus)>> {
        let Some(mut child) = self.members.remove(&role) else {
            return Ok(None);
        };
        let status = child.wait().with_context(|| format!("cannot wait for {role}"))?;
        Ok(Some((child.id(), status)))
    }

    /// True once every process has been waited for.
    pub(crate) fn is_gone(&self) -> bool {
        self.members.is_empty()
    }

    /// The processes that have not been waited for.
    pub(crate) fn roles(&self) -> impl Iterator<Item = Role> {
        self.members.keys().copied()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.kill_all();
        for child in self.members.values_mut() {
            let _ = child.wait();
        }
    }
}

/// Passes on what a process says, until it says nothing more.
fn listen(role: Role, out: ChildStdout, sender: &Sender<News>) {
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        let news = match role {
            Role::Producer => serde_json::from_str(&line).map(News::Producer),
            Role::Rank(_) => serde_json::from_str(&line).map(|event| News::Worker(role, event)),
        };
        match news {
            Ok(news) => {
                if sender.send(news).is_err() {
                    return;
                }
            }
            Err(error) => tracing::warn!(%role, %error, line, "a line that is no event"),
        }
    }
    // The owner may be gone already; then nobody needs to know.
    let _ = sender.send(News::Silent(role));
}

/// The other side of [`Crew::start`]: binds this process's life to that of its parent.
pub(crate) fn die_with(parent: u32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot bind to the life of the parent process")?;
    // The parent may have died before the line above.
    let found = getppid().map(|pid| pid.as_raw_nonzero().get() as u32);
    anyhow::ensure!(
        found == Some(parent),
        "the parent process {parent} is gone: this process was started by `kvsluice run`, which has ended"
    );
    Ok(())
}
