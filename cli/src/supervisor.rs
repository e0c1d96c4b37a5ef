//! The life of a run: which process is started when, what its end means, and when the rest has to go.
//!
//! The order: the producer, which makes the channel; the workers, once it can be attached to; the trace; the producer's
//! summary; then the workers are asked for theirs. Whatever ends out of this order ends the run: the rest is asked to
//! drain, and killed if it does not.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use clap::ArgMatches;
use kvsluice_cpu_worker::process::{Event as ProducerEvent, Summary};
use kvsluice_gpu_worker::process::Event as WorkerEvent;
use kvsluice_layout::ids::Rank;
use kvsluice_transport::names::{ChannelName, Role};

use crate::crew::{Crew, News};
use crate::exit::Exit;
use crate::forward::forward;
use crate::progress::Progress;
use crate::report::Worked;

/// How long the others may take to drain after a loss: the run must end within a second of it.
const DRAIN_AFTER_LOSS: Duration = Duration::from_millis(600);
/// How long the processes may take to drain when nothing is lost. Longer than the producer's own patience, which ends with
/// the name of the rank that holds it up.
const DRAIN: Duration = Duration::from_secs(15);

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Ending {
    /// What the producer told at its end.
    pub(crate) produced: Option<Summary>,
    /// What the workers told at theirs.
    pub(crate) worked: BTreeMap<Role, Worked>,
    /// Every process that was started.
    pub(crate) pids: BTreeMap<Role, u32>,
    /// The exit that a loss or an interrupt asks for.
    pub(crate) exit: Option<Exit>,
}

/// A run that goes on.
pub(crate) struct Supervisor<'a> {
    crew: Crew,
    channel: &'a ChannelName,
    matches: &'a ArgMatches,
    ranks: u32,
    progress: Progress,
    device: String,
    produced: Option<Summary>,
    worked: BTreeMap<Role, Worked>,
    pids: BTreeMap<Role, u32>,
    lost: Option<Exit>,
    /// Workers that have noticed the producer's death.
    bereaved: BTreeSet<Role>,
    interrupts: u32,
    /// What still lives then is killed.
    deadline: Option<Instant>,
    killed: bool,
}

impl<'a> Supervisor<'a> {
    /// Starts the producer of a channel with `ranks` ranks. `matches` are the options to pass on.
    ///
    /// # Errors
    /// What kept the process from being started.
    pub(crate) fn start(channel: &'a ChannelName, ranks: u32, matches: &'a ArgMatches) -> anyhow::Result<Self> {
        let mut supervisor = Self {
            crew: Crew::new()?,
            channel,
            matches,
            ranks,
            progress: Progress::new(),
            device: String::new(),
            produced: None,
            worked: BTreeMap::new(),
            pids: BTreeMap::new(),
            lost: None,
            bereaved: BTreeSet::new(),
            interrupts: 0,
            deadline: None,
            killed: false,
        };
        supervisor.employ(Role::Producer)?;
        Ok(supervisor)
    }

    /// Watches until no process is left.
    ///
    /// # Errors
    /// What kept a process from being started or waited for. All of them have ended by then.
    pub(crate) fn watch(mut self) -> anyhow::Result<Ending> {
        while !self.crew.is_gone() {
            match self.crew.next(self.deadline) {
                Some(News::Producer(event)) => self.heard_producer(event)?,
                Some(News::Worker(role, event)) => self.heard_worker(role, event),
                Some(News::Silent(role)) => self.silent(role)?,
                Some(News::Interrupted) => self.interrupted(),
                None => self.too_late(),
            }
        }
        self.progress.end();
        let interrupted = (self.interrupts > 0).then_some(Exit::Interrupted);
        Ok(Ending {
            produced: self.produced,
            worked: self.worked,
            pids: self.pids,
            exit: self.lost.or(interrupted),
        })
    }

    fn employ(&mut self, role: Role) -> anyhow::Result<()> {
        let (command, rank) = match role {
            Role::Producer => ("cpu-worker", None),
            Role::Rank(rank) => ("gpu-worker", Some(rank)),
        };
        let mut args: Vec<OsString> = vec![command.into(), format!("--channel={}", self.channel).into()];
        args.push("--events=json".into());
        args.extend(rank.map(|rank| OsString::from(format!("--rank={rank}"))));
        args.extend(forward(self.matches, command));
        let pid = self.crew.start(role, &args, &[])?;
        tracing::debug!("started role={role} pid={pid}");
        self.pids.insert(role, pid);
        Ok(())
    }

    fn heard_producer(&mut self, event: ProducerEvent) -> anyhow::Result<()> {
        match event {
            ProducerEvent::Ready { .. } => {
                for rank in 0..self.ranks {
                    self.employ(Role::Rank(Rank(rank)))?;
                }
            }
            ProducerEvent::Progress { requests, of, .. } => self.progress.requests(requests, of),
            ProducerEvent::RankLost { rank, pid } => {
                self.progress
                    .say(&format!("producer says: RankLost: rank {rank}, pid {pid}"));
            }
            ProducerEvent::Refused { rank, pid, reason } => {
                self.progress.say(&format!(
                    "producer says: rank {rank} (pid {pid}) does not fit: {reason}"
                ));
            }
            ProducerEvent::Attached { .. } | ProducerEvent::Recovered { .. } | ProducerEvent::Resumed { .. } => {}
            ProducerEvent::Summary(summary) => {
                self.produced = Some(*summary);
                self.crew.ask_all_to_end();
                self.deadline.get_or_insert_with(|| Instant::now() + DRAIN);
            }
        }
        Ok(())
    }

    fn heard_worker(&mut self, role: Role, event: WorkerEvent) {
        match event {
            WorkerEvent::Ready { device, .. } => self.device = device,
            WorkerEvent::Progress { verified_bytes, .. } => {
                tracing::debug!("verified role={role} bytes={verified_bytes}");
                self.progress.verified(role, verified_bytes);
            }
            // After its summary the producer ends as it should, which a worker cannot tell from a death.
            WorkerEvent::ProducerLost { pid, .. } if self.produced.is_none() => {
                self.progress.say(&format!("{role} says: ProducerLost: pid {pid}"));
                self.bereaved.insert(role);
                self.dismiss_bereaved();
            }
            WorkerEvent::ProducerLost { .. } | WorkerEvent::Adopted { .. } | WorkerEvent::Drained { .. } => {}
            WorkerEvent::Summary {
                bytes_h2d,
                verified_bytes,
                verified_table_bytes,
                mismatched_bytes,
                ..
            } => {
                let device = self.device.clone();
                self.worked.insert(
                    role,
                    Worked {
                        device,
                        bytes_h2d,
                        verified_bytes,
                        verified_table_bytes,
                        mismatched_bytes,
                    },
                );
            }
        }
    }

    /// A process has ended: after its summary as it should, before it as a loss.
    fn silent(&mut self, role: Role) -> anyhow::Result<()> {
        let Some((pid, status)) = self.crew.bury(role)? else {
            return Ok(());
        };
        let told = match role {
            Role::Producer => self.produced.is_some(),
            Role::Rank(_) => self.worked.contains_key(&role),
        };
        let loss = Loss { role, pid, status };
        let done = told && matches!(status.code(), Some(0 | 1));
        // After a loss the others end with errors of their own; only another death is news.
        if done || self.killed || (self.lost.is_some() && status.signal().is_none()) {
            return Ok(());
        }
        self.progress.say(&loss.to_string());
        if self.lost != Some(Exit::Lost) {
            self.lost = Some(loss.exit());
        }
        let limit = Instant::now() + DRAIN_AFTER_LOSS;
        self.deadline = Some(self.deadline.map_or(limit, |earlier| earlier.min(limit)));
        match role {
            Role::Producer => self.dismiss_bereaved(),
            Role::Rank(_) => self.crew.ask_all_to_end(),
        }
        Ok(())
    }

    /// After the producer's death each worker may say that it knows, before it is asked to end.
    fn dismiss_bereaved(&self) {
        if self.lost.is_some() {
            self.bereaved.iter().for_each(|role| self.crew.ask_to_end(*role));
        }
    }

    fn interrupted(&mut self) {
        self.interrupts += 1;
        if self.interrupts > 1 {
            self.kill();
            return;
        }
        self.progress.say("draining; interrupt again to kill");
        // The workers are asked once the producer has drained: it needs their answers.
        self.crew.ask_to_end(Role::Producer);
        self.deadline = Some(Instant::now() + DRAIN);
    }

    fn too_late(&mut self) {
        for role in self.crew.roles() {
            let pid = self.pids.get(&role).copied().unwrap_or_default();
            self.progress
                .say(&format!("{role} (pid {pid}) did not drain in time and is killed"));
        }
        self.lost.get_or_insert(Exit::Lost);
        self.kill();
    }

    fn kill(&mut self) {
        self.killed = true;
        self.deadline = None;
        self.crew.kill_all();
    }
}

/// A process that ended before its work did.
#[derive(Debug)]
struct Loss {
    role: Role,
    pid: u32,
    status: ExitStatus,
}

impl Loss {
    /// A process that was killed or that panicked was lost; one that ended by itself has said why.
    fn exit(&self) -> Exit {
        match self.status.code() {
            Some(code) if code == i32::from(Exit::Refused.code()) => Exit::Refused,
            Some(code) if code == i32::from(Exit::Usage.code()) => Exit::Usage,
            _ => Exit::Lost,
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { role, pid, status } = self;
        if self.exit() != Exit::Lost {
            return write!(f, "{role} (pid {pid}) gave up, {status}; its message is above");
        }
        match role {
            Role::Producer => write!(f, "ProducerLost: pid {pid}, ")?,
            Role::Rank(rank) => write!(f, "RankLost: rank {rank}, pid {pid}, ")?,
        }
        match status.signal() {
            Some(signal) => write!(f, "killed by signal {signal}"),
            None => write!(f, "{status}"),
        }
    }
}
