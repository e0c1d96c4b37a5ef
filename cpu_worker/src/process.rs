//! The producer process: take the channel or make it, let workers in, play the workload, and leave nothing behind (X20,
//! X23–X27).
//!
//! The loop does what [`Rounds::step`] finds to do, wakes sleeping ranks once per batch, and sleeps when there is nothing
//! (X29). Nothing in it waits without a deadline.

mod channel;
mod door;
mod error;
mod event;
mod host;
mod options;
mod report;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{
    PRODUCER_SLEEPING_AT, PRODUCER_WAKE_AT, RegionMap, WORKER_SLEEPING_AT, WORKER_WAKE_AT, layout_hash,
};
use kvsluice_transport::attach::{Limits, Reception};
use kvsluice_transport::clean::clean;
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::link::{Link, Listener};
use kvsluice_transport::liveness::{Life, Proof};
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::names::{ChannelName, Role};
use kvsluice_transport::peers::Peers;
use kvsluice_transport::runtime_dir::RuntimeDir;
use kvsluice_transport::segment::{Mapping, MappingMut};
use kvsluice_transport::wait::{Futexes, Idle, Waiter, wake_sleepers};
use kvsluice_transport::watcher::{DoorWatch, PeerWatch, Watcher};

pub use error::ProcessError;
pub use event::{Completions, Event, Latency, Percentiles, STARTS_COLD, Summary, TraceSummary};
pub use options::{OnRankLost, ProducerOptions, Residence};

use crate::rounds::Rounds;
use crate::trace::Trace;
use channel::Opened;
use error::system;
use host::Host;

/// Longest sleep of an idle loop: the stop flag, deadlines and progress are looked at in between.
const LOOK: Duration = Duration::from_millis(20);
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);

type Workload = Rounds<MappingMut, Mapping, MappingMut, Trace>;

/// A random number that is not 0 (X22).
fn random() -> Result<u64, ProcessError> {
    loop {
        let drawn = getrandom::u64().map_err(|error| std::io::Error::other(error.to_string()));
        match drawn.map_err(system("draw a random number"))? {
            0 => {}
            number => return Ok(number),
        }
    }
}

/// Runs a producer until its workload is over, `stop` is set and everything has ended, or it cannot go on.
///
/// # Errors
/// [`ProcessError`]. Nothing of the channel is left behind either way, but for what a worker still holds.
pub fn run_producer(
    options: &ProducerOptions,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(Event),
) -> Result<Summary, ProcessError> {
    let name = ChannelName::new(&options.channel)?;
    let runtime = RuntimeDir::open(
        &RuntimeDir::choose(options.runtime_dir.as_deref()),
        &Peers::with(options.allowed_uids.iter().copied()),
    )?;
    let epoch = ProcessEpoch(random()?);
    let lock = RoleLock::acquire_in(&runtime, &name, Role::Producer, epoch, Duration::from_millis(200))?;
    let ended = Process::open(options, lock, epoch, tell).and_then(|mut process| {
        let ended = process.run(stop, tell);
        process.close();
        ended
    });
    // X27: the last process of a channel takes its folder away. Where a worker lives, this does nothing.
    if let Err(error) = clean(&runtime, &name, None, epoch) {
        tracing::debug!(%error, "the channel's folder stays");
    }
    ended
}

/// A worker that takes part.
struct Seat {
    watch: PeerWatch,
    pid: u32,
    segment: Mapping,
    // Kept open: its end would make this producer suspect (X23).
    _link: Link,
}

/// A running producer process.
struct Process<'a> {
    options: &'a ProducerOptions,
    rounds: Workload,
    control: MappingMut,
    seats: Vec<Option<Seat>>,
    host: Host,
    reception: Reception,
    knocks: DoorWatch,
    /// Somebody was at the door since it was last opened.
    knocked: bool,
    watcher: Watcher,
    waiter: Waiter<Futexes>,
    clock: Arc<Monotonic>,
    log: Option<(PathBuf, BufWriter<File>)>,
    trace: String,
    started_ns: u64,
    told_ns: u64,
    /// What is oldest in flight, and since when (X23).
    oldest: Option<(Position, u64)>,
    was_complete: bool,
    /// When the last worker took its seat and how many transfers were Done then, until the next one is.
    resuming: Option<(u64, u64)>,
    /// The last rank that reported a broken ring, which is said once.
    broken: Option<Rank>,
}

impl<'a> Process<'a> {
    fn open(
        options: &'a ProducerOptions,
        lock: RoleLock,
        epoch: ProcessEpoch,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Self, ProcessError> {
        let map = Arc::new(GeometryMap::new(&options.geometry)?);
        let slot_bytes = map.writeback_slot_bytes() as usize;
        let region = RegionMap::new(
            &options.geometry,
            options.ring_bytes,
            options.write_back_slots,
            slot_bytes,
        )?;
        let log = match &options.rounds_log {
            Some(path) => {
                let made = File::create(path);
                let file = made.map_err(|source| ProcessError::RoundsLog {
                    path: path.clone(),
                    source,
                })?;
                Some((path.clone(), BufWriter::new(file)))
            }
            None => None,
        };
        let trace = match &options.trace {
            Some(path) => Trace::open(path)?,
            None => Trace::sample(),
        };
        let trace_name = trace.name().to_owned();
        let clock = Arc::new(Monotonic::default());
        let opened = channel::open(options, &lock, epoch, map.clone(), region, &*clock)?;
        let Opened {
            host,
            mut producer,
            store,
            control,
            survivors,
            recovered,
        } = opened;
        let incarnation = producer.incarnation();
        let (in_flight, tail) = (producer.in_flight() as u64, producer.tail().get());
        let report = match recovered {
            true => report::agreed(&mut producer, &survivors, options, &*clock),
            false => None,
        };
        let mut rounds = Rounds::new(producer, store, map, trace, options.workload, clock.clone())?;
        if log.is_some() {
            rounds.keep_log();
        }
        let adopted = match &report {
            Some(report) => rounds.adopt(report)?,
            None => None,
        };
        if report.is_some() && adopted.is_none() {
            tracing::info!("the devices' residency is not adopted: it is not of these requests; the pools are reset");
        }
        let waiter = Waiter::new(Futexes, Idle::default());
        let bell = waiter.bell().clone();
        let watcher = Watcher::start(Arc::new(move || bell.ring())).map_err(system("start the watcher"))?;
        let ranks = options.geometry.ranks;
        let reception = Reception::new(Listener::bind(&lock)?, layout_hash(), ranks, Limits::default())?;
        let knocks = watcher
            .door(reception.ready())
            .map_err(system("watch the producer's socket"))?;
        let mut process = Self {
            options,
            rounds,
            control,
            seats: (0..ranks).map(|_| None).collect(),
            host: host.with_lock(lock),
            reception,
            knocks,
            knocked: false,
            watcher,
            waiter,
            started_ns: clock.now_ns(),
            told_ns: clock.now_ns(),
            clock,
            log,
            trace: trace_name,
            oldest: None,
            was_complete: false,
            resuming: None,
            broken: None,
        };
        let mut ranks = Vec::new();
        for survivor in survivors {
            let (rank, pid) = (survivor.survived.surviving.rank, survivor.survived.surviving.pid);
            // X25: from here on the worker accepts this producer's records. One that died since it answered is seated
            // all the same: its proof says so in a moment, and what it owes is lost then, not before (X23).
            if let Err(error) = survivor.survived.adopt(incarnation, epoch) {
                tracing::warn!(%rank, pid, %error, "a worker is gone again");
            }
            let (link, proof) = survivor.survived.into_link();
            ranks.push(rank.get());
            process.seat(rank, pid, survivor.segment, link, proof)?;
        }
        let pid = std::process::id();
        tell(Event::Ready {
            pid,
            channel: options.channel.clone(),
            incarnation: incarnation.get(),
        });
        if recovered {
            let warm_blocks = process.rounds.store().held_blocks();
            tell(Event::Recovered {
                incarnation: incarnation.get(),
                ranks,
                in_flight,
                warm_blocks,
                tail,
                adopted: adopted.is_some(),
                resumed_requests: adopted.map_or(0, |adopted| adopted.resumed),
                begun_again_requests: adopted.map_or(0, |adopted| adopted.begun_again),
            });
        }
        Ok(process)
    }

    fn seat(&mut self, rank: Rank, pid: u32, segment: Mapping, link: Link, proof: Proof) -> Result<(), ProcessError> {
        let watch = self.watcher.peer(proof, &link).map_err(system("watch a worker"))?;
        self.resuming = Some((self.clock.now_ns(), self.rounds.tally().publish_to_done_ns.len()));
        if let Some(seat) = self.seats.get_mut(rank.index()) {
            *seat = Some(Seat {
                watch,
                pid,
                segment,
                _link: link,
            });
        }
        Ok(())
    }

    fn run(&mut self, stop: &AtomicBool, tell: &mut dyn FnMut(Event)) -> Result<Summary, ProcessError> {
        let mut stopping_since_ns = None;
        loop {
            let stepped = self.rounds.step()?;
            if stepped.published {
                // X29: once per batch, after its commit.
                let ranks = self
                    .seats
                    .iter()
                    .flatten()
                    .map(|seat| (&seat.segment, WORKER_SLEEPING_AT));
                wake_sleepers(&Futexes, &self.control, PRODUCER_WAKE_AT, ranks);
            }
            self.write_log()?;
            let now_ns = self.clock.now_ns();
            let done = self.rounds.tally().publish_to_done_ns.len();
            if let Some((since_ns, _)) = self.resuming.take_if(|(_, before)| done > *before) {
                let after_us = now_ns.saturating_sub(since_ns) / 1000;
                tell(Event::Resumed { after_us });
            }
            if stop.load(Ordering::Relaxed) && stopping_since_ns.is_none() {
                stopping_since_ns = Some(now_ns);
                self.rounds.stop();
            }
            // Without all ranks nothing drains, and nothing runs either.
            let missing = self.seats.iter().any(Option::is_none) && self.rounds.producer().in_flight() == 0;
            if self.rounds.is_over() || (stopping_since_ns.is_some() && missing) {
                break;
            }
            if let Some(since_ns) = stopping_since_ns {
                let waited_ms = now_ns.saturating_sub(since_ns) / 1_000_000;
                if waited_ms > self.options.drain_patience_ms {
                    return Err(ProcessError::Stuck {
                        waited_ms,
                        oldest: self.rounds.producer().oldest(),
                    });
                }
            }
            self.look_around(now_ns, tell)?;
            if !stepped.worked {
                self.idle(stop, stopping_since_ns.is_some());
            }
        }
        if let Some((path, file)) = &mut self.log {
            file.flush().map_err(|source| ProcessError::RoundsLog {
                path: path.clone(),
                source,
            })?;
        }
        let summary = self.summary();
        tell(Event::Summary(Box::new(summary.clone())));
        Ok(summary)
    }

    /// Sleeps until an answer, a knock, a death or the stop flag, for a bounded time.
    fn idle(&mut self, stop: &AtomicBool, stopping: bool) {
        let Self {
            rounds,
            seats,
            control,
            knocks,
            knocked,
            waiter,
            clock,
            ..
        } = self;
        let until_ns = clock.now_ns().saturating_add(LOOK.as_nanos() as u64);
        let peers: Vec<(Mapping, usize)> = seats
            .iter()
            .flatten()
            .map(|seat| (seat.segment.clone(), WORKER_WAKE_AT))
            .collect();
        waiter.wait(control, PRODUCER_SLEEPING_AT, &peers, &**clock, until_ns, || {
            let died = seats.iter().flatten().any(|seat| seat.watch.life() == Life::Dead);
            let stop = stop.load(Ordering::Relaxed) && !stopping;
            *knocked |= knocks.knocked();
            (rounds.has_news() || died || stop || *knocked).then_some(())
        });
    }

    /// Deaths, the door, broken rings, hung ranks, and progress.
    fn look_around(&mut self, now_ns: u64, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        for rank in (0..self.options.geometry.ranks).map(Rank) {
            self.look_at_rank(rank, tell)?;
        }
        let complete = self.seats.iter().all(Option::is_some);
        self.was_complete |= complete;
        // Deadlines at the door pass without a knock, so it is looked at every time while somebody is missing.
        self.knocked |= self.knocks.knocked();
        if std::mem::take(&mut self.knocked) || !complete || self.host.expects_somebody() {
            self.open_door(now_ns, tell)?;
        }
        if now_ns.saturating_sub(self.told_ns) < PROGRESS.as_nanos() as u64 {
            return Ok(());
        }
        self.told_ns = now_ns;
        if let Some((rank, position, found)) = self.rounds.producer().broken()
            && self.broken != Some(rank)
        {
            // X33: the word is the rank's to write, so it ends nothing here. A rank that means it detaches, which is seen
            // as its death; one that lies stalls its own records until it is expelled.
            tracing::error!(%rank, %position, found, "a rank reports that the ring is broken (X9); restart both sides");
            self.broken = Some(rank);
        }
        self.look_at_hung(now_ns);
        self.host.check_still_there()?;
        let waited_ms = now_ns.saturating_sub(self.started_ns) / 1_000_000;
        if !self.was_complete && waited_ms > self.options.attach_patience_ms {
            let missing = (0_u32..).zip(&self.seats).filter(|(_, seat)| seat.is_none());
            let ranks = missing.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(", ");
            let channel = self.options.channel.clone();
            return Err(ProcessError::NoWorkers {
                ranks,
                channel,
                waited_ms,
            });
        }
        let tally = self.rounds.tally();
        tell(Event::Progress {
            requests: tally.requests,
            of: self.options.workload.requests,
            plans: tally.plans,
            bytes_h2d: tally.costs.h2d_bytes,
        });
        Ok(())
    }

    /// X23: kills a rank that holds the oldest record for too long, and still awaits the proof. One that cannot be killed
    /// is named: what it may touch stays quarantined.
    fn look_at_hung(&mut self, now_ns: u64) {
        let Some(patience_ms) = self.options.expel_after_ms else {
            return;
        };
        let Some(oldest) = self.rounds.producer().oldest() else {
            self.oldest = None;
            return;
        };
        let since_ns = match self.oldest {
            Some((position, since_ns)) if position == oldest.position => since_ns,
            _ => now_ns,
        };
        self.oldest = Some((oldest.position, since_ns));
        if now_ns.saturating_sub(since_ns) / 1_000_000 > patience_ms
            && let Some(seat) = self.seats.get(oldest.rank.index()).and_then(Option::as_ref)
        {
            match seat.watch.proof().expel() {
                Ok(()) => tracing::error!(%oldest, patience_ms, "a rank hangs and is killed"),
                Err(error) => tracing::error!(%oldest, %error, "a rank hangs and stays, and its blocks with it"),
            }
            self.oldest = Some((oldest.position, now_ns));
        }
    }

    fn write_log(&mut self) -> Result<(), ProcessError> {
        let Some((path, file)) = &mut self.log else {
            return Ok(());
        };
        for record in self.rounds.take_log() {
            let line = serde_json::to_string(&record).map_err(std::io::Error::from);
            let written = line.and_then(|line| writeln!(file, "{line}"));
            written.map_err(|source| ProcessError::RoundsLog {
                path: path.clone(),
                source,
            })?;
        }
        Ok(())
    }

    fn summary(&self) -> Summary {
        let wall_ns = self.clock.now_ns().saturating_sub(self.started_ns);
        let trace = TraceSummary {
            file: self.trace.clone(),
            requests: self.rounds.tally().requests,
        };
        Summary::new(&self.rounds, wall_ns, trace)
    }

    /// Removes what has a name.
    fn close(self) {
        let Self {
            host,
            rounds,
            reception,
            knocks,
            ..
        } = self;
        drop((rounds, knocks, reception));
        host.discard();
    }
}

#[cfg(test)]
mod tests;
