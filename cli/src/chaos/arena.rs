//! The loop: start, strike, hear, start again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use kvsluice_cpu_worker::process::{Event as ProducerEvent, STARTS_COLD};
use kvsluice_gpu_worker::process::Event as WorkerEvent;
use kvsluice_layout::ids::Rank;
use kvsluice_transport::death::{self, DIE_AT_ENV};
use kvsluice_transport::names::{ChannelName, Role};
use rustix::process::Signal;

use super::Target;
use super::strike::{How, Strike, When};
use super::tally::Tally;
use super::view::View;
use crate::crew::{Crew, News};

/// Nothing takes so long: whoever waits longer hangs.
const HANG: Duration = Duration::from_secs(30);
/// An event that a strike waits for may not come.
const EVENT_PATIENCE: Duration = Duration::from_millis(150);

/// What a run is to do.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) seed: u64,
    pub(crate) length: Duration,
    pub(crate) kills_max: u64,
    pub(crate) ranks: u32,
    /// A channel outlives its producer: a start in the cold loses plans.
    pub(crate) warm: bool,
    /// Strike only what has recovered, by SIGKILL alone: for a measurement.
    pub(crate) always_calm: bool,
}

/// A process that was killed and whose work has not gone on yet.
struct Wound {
    role: Role,
    pid: u32,
    at: Instant,
    /// Its successor takes part.
    replaced: bool,
    /// It was killed from here; else it is the first start, or a process that ended by itself.
    killed: bool,
}

/// What a live worker has told of itself.
#[derive(Clone, Copy, Default)]
struct Told {
    verified: u64,
    mismatched: u64,
    repeated: u64,
}

/// A run that goes on.
pub(super) struct Arena<'a> {
    plan: &'a Plan,
    channel: &'a ChannelName,
    folder: &'a Path,
    options: &'a dyn Fn(&str) -> Vec<OsString>,
    crew: Crew,
    rng: fastrand::Rng,
    tally: Tally,
    view: View,
    last: String,
    pids: BTreeMap<Role, u32>,
    /// Deaths that a test orders, which come instead of the strikes.
    orders: VecDeque<(Role, String)>,
    /// Processes that are to die by themselves, and where.
    doomed: BTreeMap<u32, String>,
    /// Processes that were killed from here and have not fallen silent yet.
    struck: BTreeSet<u32>,
    wounds: Vec<Wound>,
    /// Stopped processes: when to go on, and whether by SIGKILL.
    stopped: BTreeMap<Role, (Instant, bool, String)>,
    told: BTreeMap<Role, Told>,
    /// What a rank had read of the ring when its producer died, and that producer.
    consumed: BTreeMap<u32, (u32, u64)>,
    /// The producer that spoke last.
    producer: u32,
    /// The strike that comes next, and when; `None` for the instant: not due yet.
    next: Strike,
    due: Option<Instant>,
    /// The event that the strike waits for has come.
    at_event: bool,
    heard_at: Instant,
    ending: bool,
    summed: BTreeSet<Role>,
    interrupted: bool,
}

impl<'a> Arena<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        channel: &'a ChannelName,
        folder: &'a Path,
        options: &'a dyn Fn(&str) -> Vec<OsString>,
    ) -> anyhow::Result<Self> {
        let mut rng = fastrand::Rng::with_seed(plan.seed);
        let next = Strike::draw(&mut rng, plan.target, plan.ranks, true);
        let mut arena = Self {
            plan,
            channel,
            folder,
            options,
            crew: Crew::new()?,
            rng,
            tally: Tally::default(),
            view: View::new(),
            last: String::new(),
            pids: BTreeMap::new(),
            orders: death::orders().into(),
            doomed: BTreeMap::new(),
            struck: BTreeSet::new(),
            wounds: Vec::new(),
            stopped: BTreeMap::new(),
            told: BTreeMap::new(),
            consumed: BTreeMap::new(),
            producer: 0,
            next,
            due: None,
            at_event: false,
            heard_at: Instant::now(),
            ending: false,
            summed: BTreeSet::new(),
            interrupted: false,
        };
        for role in arena.roles() {
            arena.employ(role)?;
        }
        // The first start is like a recovery: nothing is struck before data flows.
        let pid = arena.pids.get(&Role::Producer).copied().unwrap_or_default();
        arena.wounds.push(Wound {
            role: Role::Producer,
            pid,
            at: Instant::now(),
            replaced: true,
            killed: false,
        });
        Ok(arena)
    }

    fn roles(&self) -> Vec<Role> {
        let ranks = (0..self.plan.ranks).map(|rank| Role::Rank(Rank(rank)));
        std::iter::once(Role::Producer).chain(ranks).collect()
    }

    /// Goes on until the time is over, everything has recovered and drained, and every process has ended.
    pub(super) fn fight(mut self) -> anyhow::Result<Tally> {
        let until = Instant::now() + self.plan.length;
        // The first of the ordered deaths are already on their way.
        let ordered = (self.orders.len() + self.doomed.len()) as u64;
        let kills_max = if ordered > 0 { ordered } else { self.plan.kills_max };
        while !self.interrupted {
            let now = Instant::now();
            let over = now >= until || self.tally.kills() >= kills_max;
            if over {
                self.due = None; // nothing more is struck, and nothing is waited for on its account
            }
            if over && self.wounds.is_empty() && self.stopped.is_empty() {
                break;
            }
            if now.duration_since(self.heard_at) > HANG {
                self.hang("no event");
                break;
            }
            if self.oldest_wound().is_some_and(|at| now.duration_since(at) > HANG) {
                self.hang("no transfer is Done");
                break;
            }
            self.let_go_on(now);
            if !over && ordered == 0 {
                self.aim(now);
                if self.due.is_some_and(|due| now >= due) {
                    self.strike(now);
                }
            }
            let wake = self.stopped.values().map(|(at, ..)| *at).chain(self.due).min();
            let wake = wake.unwrap_or(now + Duration::from_millis(100)).min(now + HANG);
            if let Some(news) = self.crew.next(Some(wake)) {
                self.hear(news)?;
            }
            self.view.show(&self.tally, &self.last);
        }
        self.drain()?;
        self.view.end();
        Ok(self.tally)
    }

    fn oldest_wound(&self) -> Option<Instant> {
        self.wounds.iter().map(|wound| wound.at).min()
    }

    fn employ(&mut self, role: Role) -> anyhow::Result<()> {
        let (command, rank) = match role {
            Role::Producer => ("cpu-worker", None),
            Role::Rank(rank) => ("gpu-worker", Some(rank)),
        };
        let mut args: Vec<OsString> = vec![command.into(), format!("--channel={}", self.channel).into()];
        args.push("--events=json".into());
        match rank {
            Some(rank) => args.push(format!("--rank={rank}").into()),
            None => args.push("--wait-for-ranks".into()),
        }
        args.extend((self.options)(command));
        let mut folder = OsString::from("--runtime-dir=");
        folder.push(self.folder);
        args.push(folder);
        let mut variables = Vec::new();
        if std::env::var_os("RUST_LOG").is_none() {
            // What would be worth a warning elsewhere is what happens here all the time.
            variables.push(("RUST_LOG", "error".to_owned()));
        }
        let order = self.orders.iter().position(|(doomed, _)| *doomed == role);
        let order = order.and_then(|at| self.orders.remove(at)).map(|(_, at)| at);
        variables.push((DIE_AT_ENV, order.clone().unwrap_or_default()));
        let pid = self.crew.start(role, &args, &variables)?;
        self.doomed.extend(order.map(|at| (pid, at)));
        tracing::debug!("started role={role} pid={pid}");
        self.pids.insert(role, pid);
        Ok(())
    }

    /// Draws the next strike, and finds out when it is due.
    fn aim(&mut self, now: Instant) {
        if self.due.is_none() && (!self.next.calm || (self.wounds.is_empty() && self.stopped.is_empty())) {
            self.due = Some(match self.next.when {
                When::After(pause) => now + pause,
                When::Event(..) => now + EVENT_PATIENCE,
            });
        }
    }

    fn strike(&mut self, now: Instant) {
        let strike = self.next.clone();
        for role in &strike.roles {
            if self.stopped.contains_key(role) {
                continue;
            }
            let point = format!("{}:{}", side(*role), strike.point(self.at_event));
            match strike.how {
                How::Kill => self.kill(*role, point),
                How::Stop(pause) => self.stop(*role, now + pause, false, point),
                How::StopAndKill(pause) => self.stop(*role, now + pause, true, point),
            }
        }
        self.next = Strike::draw(&mut self.rng, self.plan.target, self.plan.ranks, self.plan.always_calm);
        (self.due, self.at_event) = (None, false);
    }

    fn kill(&mut self, role: Role, point: String) {
        let Some(pid) = self.pids.get(&role).copied().filter(|pid| !self.struck.contains(pid)) else {
            return;
        };
        if self.crew.signal(role, Signal::KILL) != Some(pid) {
            return;
        }
        self.struck.insert(pid);
        self.killed(role, pid, point);
    }

    fn killed(&mut self, role: Role, pid: u32, point: String) {
        self.last = format!("killed {point} (pid {pid})");
        tracing::debug!("killed {point} pid={pid}");
        *self.tally.kills_by_point.entry(point).or_default() += 1;
        self.wounds.push(Wound {
            role,
            pid,
            at: Instant::now(),
            replaced: false,
            killed: true,
        });
    }

    fn stop(&mut self, role: Role, until: Instant, kill: bool, point: String) {
        if self.crew.signal(role, Signal::STOP).is_some() {
            self.tally.stops += 1;
            self.stopped.insert(role, (until, kill, point));
        }
    }

    /// Ends the stops whose time is over.
    fn let_go_on(&mut self, now: Instant) {
        let due = |(role, (until, ..)): (&Role, &(Instant, bool, String))| (now >= *until).then_some(*role);
        let over: Vec<Role> = self.stopped.iter().filter_map(due).collect();
        for role in over {
            match self.stopped.remove(&role) {
                Some((_, true, point)) => self.kill(role, point),
                _ => {
                    self.crew.signal(role, Signal::CONT);
                }
            }
        }
    }

    fn hear(&mut self, news: News) -> anyhow::Result<()> {
        self.heard_at = Instant::now();
        match news {
            News::Producer(event) => self.heard_producer(event),
            News::Worker(role, event) => self.heard_worker(role, event),
            News::Silent(role) => self.silent(role)?,
            News::Interrupted => self.interrupted = true,
        }
        Ok(())
    }

    /// An event that the next strike may have waited for.
    fn point(&mut self, name: &'static str) {
        if let When::Event(event, later) = self.next.when
            && event == name
            && self.due.is_some()
            && !self.at_event
        {
            self.at_event = true;
            self.due = Some(Instant::now() + later);
        }
    }

    fn heard_producer(&mut self, event: ProducerEvent) {
        match event {
            ProducerEvent::Ready { pid, incarnation, .. } => {
                self.producer = pid;
                self.tally.cold_starts += u64::from(incarnation == 1);
                self.replaced(Role::Producer, pid);
                self.point("ready");
            }
            ProducerEvent::Recovered {
                ranks,
                in_flight,
                tail,
                adopted,
                resumed_requests,
                ..
            } => {
                self.tally.takeovers += 1;
                self.tally.adopted += u64::from(adopted);
                self.tally.resumed_requests += resumed_requests;
                self.tally.recovered_records += in_flight;
                for rank in ranks {
                    // X25: a record that a worker has read is in the journal or below it. The worker may be heard first
                    // on this very producer's death: what it has read by then is for the next takeover to know.
                    let read = self.consumed.get(&rank).filter(|(lost, _)| *lost != self.producer);
                    if let Some((_, read)) = read.copied() {
                        self.consumed.remove(&rank);
                        if read > tail {
                            self.lost(&format!(
                                "rank {rank} has read up to {read}, the journal ends at {tail}"
                            ));
                        }
                    }
                    let role = Role::Rank(Rank(rank));
                    if let Some(pid) = self.pids.get(&role).copied() {
                        self.replaced(role, pid);
                    }
                }
                self.point("recovered");
            }
            ProducerEvent::Attached { rank, pid } => {
                self.replaced(Role::Rank(Rank(rank)), pid);
                self.point("attached");
            }
            ProducerEvent::RankLost { .. } => self.point("rank-lost"),
            ProducerEvent::Resumed { after_us } => {
                self.resumed(after_us);
                self.point("resumed");
            }
            ProducerEvent::Refused { rank, pid, reason } => {
                self.view.say(&format!("rank {rank} (pid {pid}) was refused: {reason}"));
            }
            ProducerEvent::Progress { .. } => {}
            ProducerEvent::Summary(summary) => {
                let (published, ended) = (summary.completions.published, summary.completions.ended());
                if published != ended {
                    self.view
                        .say(&format!("{published} operations were published, {ended} have ended"));
                }
                self.tally.ended(&summary);
                self.summed.insert(Role::Producer);
            }
        }
    }

    fn heard_worker(&mut self, role: Role, event: WorkerEvent) {
        match event {
            WorkerEvent::Ready { rank, .. } => {
                self.consumed.remove(&rank);
                self.point("joined");
            }
            WorkerEvent::Progress {
                verified_bytes,
                mismatched_bytes,
                repeated,
                ..
            } => {
                let told = Told {
                    verified: verified_bytes,
                    mismatched: mismatched_bytes,
                    repeated,
                };
                let before = self.told.insert(role, told).unwrap_or_default();
                self.tally.early_reuse += u64::from(told.mismatched > before.mismatched);
                self.tally.mismatched_bytes += told.mismatched.saturating_sub(before.mismatched);
                self.tally.double_applied += told.repeated.saturating_sub(before.repeated);
                self.tally.verified_bytes += told.verified.saturating_sub(before.verified);
            }
            WorkerEvent::ProducerLost { rank, pid, consumed } => {
                self.consumed.insert(rank, (pid, consumed));
                self.point("producer-lost");
            }
            WorkerEvent::Adopted { .. } => self.point("adopted"),
            WorkerEvent::Drained { reason, .. } => {
                if self.plan.warm && reason == STARTS_COLD {
                    self.lost(&format!("{role} was told that {reason}"));
                }
                // Its counts begin again.
                self.told.remove(&role);
                self.tally.drained += 1;
            }
            // All of it was told before.
            WorkerEvent::Summary { .. } => {
                self.summed.insert(role);
            }
        }
    }

    /// A process takes part: whoever had its role before is replaced.
    fn replaced(&mut self, role: Role, pid: u32) {
        for wound in self
            .wounds
            .iter_mut()
            .filter(|wound| wound.role == role && wound.pid != pid)
        {
            wound.replaced = true;
        }
    }

    /// Data flows: what was replaced has recovered.
    fn resumed(&mut self, after_us: u64) {
        let now = Instant::now();
        let recovery = &mut self.tally.recovery;
        let before = recovery.len();
        self.wounds.retain(|wound| {
            if wound.replaced && wound.killed {
                recovery.push(now.duration_since(wound.at));
            }
            !wound.replaced
        });
        if recovery.len() > before {
            self.tally.attach_to_done.push(Duration::from_micros(after_us));
            self.last = format!("recovered, {after_us} us after the attach");
        }
    }

    /// A process has ended: it is started again, unless the end has come.
    fn silent(&mut self, role: Role) -> anyhow::Result<()> {
        let Some((pid, status)) = self.crew.bury(role)? else {
            return Ok(());
        };
        self.stopped.remove(&role);
        self.told.remove(&role);
        let summed = self.summed.remove(&role);
        if self.ending {
            self.tally.gave_up += u64::from(!summed || status.code().is_none_or(|code| code > 1));
            return Ok(());
        }
        let doom = self.doomed.remove(&pid);
        if let Some(at) = doom.filter(|_| status.signal() == Some(Signal::KILL.as_raw())) {
            // It is counted where it was to die, and not where in its count.
            let place = at.split_once(':').map_or("store", |(point, _)| point);
            self.killed(role, pid, format!("{}:{place}", side(role)));
        } else if !self.struck.remove(&pid) {
            if role == Role::Producer && summed && status.code() == Some(0) {
                self.tally.played += 1;
            } else {
                let signal = status
                    .signal()
                    .map_or(String::new(), |signal| format!(" by signal {signal}"));
                self.view.say(&format!("{role} (pid {pid}) gave up{signal}: {status}"));
                self.tally.gave_up += 1;
            }
            // Like a kill, but for the counts: data is to flow again.
            self.wounds.push(Wound {
                role,
                pid,
                at: Instant::now(),
                replaced: false,
                killed: false,
            });
        }
        self.tally.restarts += 1;
        self.employ(role)
    }

    fn lost(&mut self, why: &str) {
        self.view.say(&format!("a plan is lost: {why}"));
        self.tally.lost_plans += 1;
    }

    fn hang(&mut self, what: &str) {
        let wounds = self.wounds.iter().map(|wound| (wound.role, wound.pid, wound.replaced));
        let wounds: Vec<_> = wounds.collect();
        self.view.say(&format!(
            "hangs: {what} for {HANG:?}; waited for {wounds:?}, processes {:?}",
            self.pids
        ));
        self.tally.hangs += 1;
    }

    /// Lets everything end as it should: the producer first, which needs the workers' answers.
    fn drain(&mut self) -> anyhow::Result<()> {
        self.ending = true;
        for role in self.roles() {
            self.crew.signal(role, Signal::CONT);
        }
        self.crew.ask_to_end(Role::Producer);
        let deadline = Instant::now() + HANG;
        let mut asked = false;
        while !self.crew.is_gone() {
            if !asked && self.crew.roles().all(|role| role != Role::Producer) {
                asked = true;
                self.crew.ask_all_to_end();
            }
            match self.crew.next(Some(deadline)) {
                Some(news) => self.hear(news)?,
                None => {
                    self.hang("the end");
                    self.crew.kill_all();
                    for role in self.roles() {
                        self.crew.bury(role)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The name of a role's side in `kills_by_point`.
fn side(role: Role) -> &'static str {
    match role {
        Role::Producer => "producer",
        Role::Rank(_) => "worker",
    }
}
