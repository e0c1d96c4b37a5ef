//! The rounds of a workload: scores → selection → plan → upload → commit → retention → retirement, for many requests at
//! a time.
//!
//! [`Rounds::step`] polls the ranks' answers, moves every request on as far as it goes, admits new ones, and publishes
//! the records of all of them in one batch. It never waits and makes no system call: the producer process, the simulator
//! and the tests run the same code on the memory that they have.
//!
//! A request goes round: *upload* (or Keep) → every rank Done → ledger commit → *retain* → every rank Done → commit and
//! retirement of what no table names any more (R43, R57). When it ends, a last Retain drops its tables, and on Done all
//! that it held is free (F12). Device blocks may run out between two requests that both need more: then the younger gives
//! its blocks back and begins again, so the oldest always comes to its end.

mod adopt;
mod error;
mod hands;
mod layers;
mod options;
mod outcome;
mod report;
mod request;
mod retention;
mod scores;
mod upload;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;

use kvsluice_layout::ids::{GroupId, PoolGeneration, Position, RequestEpoch};
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::Terminal;
use kvsluice_layout::refusal::reason;
use kvsluice_transport::clock::Clock;
use kvsluice_transport::producer::{Completion, Producer, PublishError};
use kvsluice_transport::shared::{Shared, SharedMut};

pub use adopt::Adopted;
pub use error::RoundsError;
pub use options::{Agreement, Keeping, OptionsError, Sources, Tables, WorkloadOptions};
pub use report::{Costs, RetainCosts, RetainedBy, RoundRecord, Tally, UploadKind};

use crate::ledger::Ledger;
use crate::owner::Owners;
use crate::planner::Planner;
use crate::residency::Residency;
use crate::selector::Selector;
use crate::store::HostStore;
use crate::trace::{TraceError, TraceRequest};
use hands::{Blocked, Hands, Launch};
use layers::{capacity, plan_layers};
use request::{Ending, Request, Step};
use upload::SourceMap;

/// Whether data records flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// The pools must be reset before anything else: at the start, after the loss of a rank, and where ranks differ.
    Interrupted,
    /// A Reset is in flight.
    Resetting(Position),
    /// They flow.
    Running,
}

/// What one step came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stepped {
    /// Something moved: step again at once.
    pub worked: bool,
    /// Records were published: wake sleeping ranks.
    pub published: bool,
}

/// A workload on a channel. `C` is the control segment, `R` a rank's, `P` the pool, `T` the trace.
pub struct Rounds<C, R, P, T> {
    hands: Hands<C, R, P>,
    trace: T,
    trace_over: bool,
    admitted: u64,
    epochs: u64,
    /// Requests that are played, by number.
    requests: HashMap<u64, Request>,
    /// Requests that gave their blocks back and wait for room.
    preempted: VecDeque<Request>,
    /// Requests that can take a step now.
    ready: VecDeque<u64>,
    /// Requests that wait for room, in the order of their admission, and for what.
    blocked: Vec<(u64, Blocked)>,
    mode: Mode,
    /// Bytes of the pool that every rank has registered, when it was last looked at (X31).
    pinned_bytes: u64,
    stopping: bool,
    log: Option<Vec<RoundRecord>>,
}

impl<C, R, P, T> Rounds<C, R, P, T>
where
    C: SharedMut,
    R: Shared,
    P: SharedMut,
    T: Iterator<Item = Result<TraceRequest, TraceError>>,
{
    /// A workload that has not begun: its first step resets the device pools.
    ///
    /// # Errors
    /// [`RoundsError::Options`] for options that the geometry cannot carry.
    pub fn new(
        producer: Producer<C, R>,
        store: HostStore<C, P>,
        map: Arc<GeometryMap>,
        trace: T,
        options: WorkloadOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, RoundsError> {
        options.check(map.geometry())?;
        let layers = plan_layers(&map, &options)?;
        let ranks = NonZeroU32::new(map.geometry().ranks).unwrap_or(NonZeroU32::MIN);
        let hands = Hands {
            owners: Owners::of_geometry(map.geometry())?,
            producer,
            store,
            map,
            options,
            layers,
            clock,
            ledger: Ledger::new(ranks),
            selector: Selector::new(),
            scores: Vec::new(),
            planner: Planner::new(),
            retain_planners: Vec::new(),
            draft: PlanDraft::new(),
            sources: SourceMap::default(),
            gather_frames: Vec::new(),
            flights: HashMap::new(),
            tally: Tally::new()?,
            published: false,
        };
        Ok(Self {
            hands,
            trace,
            trace_over: false,
            admitted: 0,
            epochs: 0,
            requests: HashMap::new(),
            preempted: VecDeque::new(),
            ready: VecDeque::new(),
            blocked: Vec::new(),
            mode: Mode::Interrupted,
            pinned_bytes: 0,
            stopping: false,
            log: None,
        })
    }

    /// Keeps a record of every round, for [`take_log`](Self::take_log).
    pub fn keep_log(&mut self) {
        self.log = Some(Vec::new());
    }

    /// The records of the rounds that ended since the last call.
    pub fn take_log(&mut self) -> Vec<RoundRecord> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The producer's end of the channel.
    pub fn producer(&self) -> &Producer<C, R> {
        &self.hands.producer
    }

    /// The producer's end of the channel, for members that join or are lost.
    pub fn producer_mut(&mut self) -> &mut Producer<C, R> {
        &mut self.hands.producer
    }

    /// The host store.
    pub fn store(&self) -> &HostStore<C, P> {
        &self.hands.store
    }

    /// What was done so far.
    pub fn tally(&self) -> &Tally {
        &self.hands.tally
    }

    /// Requests that were admitted and have not ended.
    pub fn open_requests(&self) -> usize {
        self.requests.len() + self.preempted.len()
    }

    /// Ends the workload early: nothing more is admitted, and every request ends with its next step.
    pub fn stop(&mut self) {
        self.stopping = true;
        self.requests.values_mut().for_each(|request| request.finished = true);
        self.preempted.clear();
    }

    /// True once every request has ended and nothing is in flight.
    pub fn is_over(&self) -> bool {
        let admitting = !self.trace_over && !self.stopping;
        !admitting && self.open_requests() == 0 && self.hands.flights.is_empty() && self.hands.producer.in_flight() == 0
    }

    /// Blocks that are still leased, and device blocks that are not free: 0 once a workload is over (F12).
    pub fn leaked_blocks(&self) -> u64 {
        let leased = self.hands.producer.leases().leased_blocks() as u64;
        let specs = &self.hands.map.geometry().groups;
        let owned = specs.iter().zip(self.hands.owners.all());
        leased
            + owned
                .map(|(spec, owner)| u64::from(capacity(spec) - owner.free_blocks().get()))
                .sum::<u64>()
    }

    /// True where a rank has answered, or registered more of the pool: for a caller that waits before its next step.
    pub fn has_news(&mut self) -> bool {
        let pinning = self.mode == Mode::Running && self.pinned_bytes < self.hands.map.pool_bytes();
        self.hands.producer.poll_thorough() > 0 || (pinning && self.hands.producer.pinned_bytes() != self.pinned_bytes)
    }

    /// Does all that can be done now.
    ///
    /// # Errors
    /// [`RoundsError`]: the workload cannot go on.
    pub fn step(&mut self) -> Result<Stepped, RoundsError> {
        self.hands.producer.poll();
        let stepped = self.advance()?;
        if stepped.worked {
            return Ok(stepped);
        }
        // About to be idle: answers that came out of order are looked for at once.
        self.hands.producer.poll_thorough();
        self.advance()
    }

    fn advance(&mut self) -> Result<Stepped, RoundsError> {
        let mut worked = false;
        while let Some(completion) = self.hands.producer.next_completion() {
            worked = true;
            self.complete(&completion)?;
        }
        // X24: a rank may be lost, and replaced, while nothing is in flight that would tell, and nothing is to be published.
        if self.hands.producer.closed().is_some() && !planted("x24_a_quiet_loss_is_missed") {
            self.interrupt();
        }
        match self.mode {
            Mode::Interrupted => worked |= self.begin_reset(),
            Mode::Resetting(_) => {}
            Mode::Running => {
                worked |= self.look_at_pins();
                if worked {
                    // Something may have made room.
                    self.ready.extend(self.blocked.drain(..).map(|(number, _)| number));
                }
                worked |= self.run_ready()?;
                while self.mode == Mode::Running && self.admit()? {
                    worked = true;
                    self.run_ready()?;
                }
                self.make_room(worked)?;
            }
        }
        self.hands.producer.flush();
        Ok(Stepped {
            worked,
            published: std::mem::take(&mut self.hands.published),
        })
    }

    /// Publishes the next Reset, once nothing is in flight and every rank has a worker (X24, X24a).
    fn begin_reset(&mut self) -> bool {
        let producer = &mut self.hands.producer;
        producer.refresh_open();
        let missing = matches!(producer.closed(), Some(PublishError::RankMissing { .. }));
        if missing || producer.in_flight() > 0 {
            return false;
        }
        let generation = PoolGeneration(producer.generation().get() + 1);
        self.hands.draft.reset(generation);
        let Ok(position) = producer.enqueue(&self.hands.draft) else {
            return false;
        };
        self.hands.published = true;
        self.mode = Mode::Resetting(position);
        true
    }

    /// The devices are empty: every request begins a new life.
    fn after_reset(&mut self) -> Result<(), RoundsError> {
        self.mode = Mode::Running;
        self.pinned_bytes = 0;
        self.look_at_pins();
        self.hands.tally.resets += 1;
        self.hands.owners = Owners::of_geometry(self.hands.map.geometry())?;
        self.blocked.clear();
        self.ready.clear();
        let mut numbers: Vec<u64> = self.requests.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            self.hands.tally.restarted += 1;
            let Some(request) = self.requests.remove(&number) else {
                continue;
            };
            if request.finished {
                // It holds nothing any more, and nobody waits for it.
                self.hands.ledger.finish(&request.id, request.residency.request_epoch());
                self.hands.tally.requests += 1;
            } else {
                self.preempted.push_back(request);
            }
        }
        Ok(())
    }

    /// Takes the frames into use that every rank has registered meanwhile (X31). True where there are more.
    fn look_at_pins(&mut self) -> bool {
        let pool_bytes = self.hands.map.pool_bytes();
        if self.pinned_bytes >= pool_bytes {
            return false;
        }
        let pinned_bytes = self.hands.producer.pinned_bytes();
        let more = pinned_bytes != self.pinned_bytes;
        self.pinned_bytes = pinned_bytes;
        self.hands
            .store
            .set_pinned(pinned_bytes, self.hands.producer.leases_mut());
        more
    }

    /// A rank was lost, or ranks hold different tables: nothing flows before the pools are reset. What is in flight still
    /// ends, and changes nothing any more.
    fn interrupt(&mut self) {
        if self.mode == Mode::Running {
            self.mode = Mode::Interrupted;
        }
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), RoundsError> {
        if let Mode::Resetting(position) = self.mode
            && completion.position == position
        {
            if completion.terminal == Terminal::Done && self.hands.producer.closed().is_none() {
                return self.after_reset();
            }
            self.mode = Mode::Interrupted; // X24a: repeated while any rank's generation differs
            return Ok(());
        }
        // A record of an earlier producer has no flight here.
        let Some(flight) = self.hands.flights.remove(&completion.position.get()) else {
            return Ok(());
        };
        if completion.terminal == Terminal::RankLost {
            self.interrupt();
        }
        if !flight.is_abort && completion.terminal == Terminal::Done {
            let waited_ns = self.hands.clock.now_ns().saturating_sub(flight.published_ns);
            self.hands.tally.publish_to_done_ns.saturating_record(waited_ns.max(1));
        }
        if self.mode != Mode::Running {
            return Ok(());
        }
        let Some(mut request) = self.requests.remove(&flight.request) else {
            return Ok(());
        };
        if completion.terminal > Terminal::Superseded {
            tracing::warn!(
                request = request.number, round = request.round, position = %completion.position, kind = ?completion.kind,
                terminal = ?completion.terminal, rank = %completion.rank, reason = reason(completion.reason),
                row = completion.row, "an operation did not end well"
            );
        }
        let step = std::mem::replace(&mut request.step, Step::Upload);
        let mut differ = false;
        match step {
            Step::Uploading(transfer) => self.hands.upload_ended(&mut request, transfer, completion)?,
            Step::Retaining(retaining) => {
                differ = !self
                    .hands
                    .retain_ended(&mut request, *retaining, completion, flight.published_ns)?;
                if !differ {
                    self.end_round(&mut request);
                }
            }
            Step::Ended(ending) if completion.terminal == Terminal::Done => {
                return self.ended(request, ending);
            }
            step => {
                differ = true;
                request.step = step;
            }
        }
        if differ {
            self.interrupt();
        }
        self.ready.push_back(request.number);
        self.requests.insert(request.number, request);
        Ok(())
    }

    fn end_round(&mut self, request: &mut Request) {
        let record = &mut request.record;
        record.map_revision = request.residency.map_revision().get();
        record.selection_revision = request.residency.revision().get();
        self.hands.tally.rounds += 1;
        self.hands.tally.costs.add(&record.costs);
        if let Some(log) = &mut self.log {
            log.push(*record);
        }
        request.round += 1;
        request.selection.clear();
        request.step = Step::Upload;
    }

    /// The last record of a request is Done: everything that it holds is free (F12).
    fn ended(&mut self, mut request: Request, ending: Ending) -> Result<(), RoundsError> {
        let hands = &mut self.hands;
        let number = request.number;
        let layers = hands.layers.iter().map(|plan| (plan.layer, plan.group));
        let empty = Residency::new(RequestEpoch(0), PoolGeneration(0), layers);
        let residency = std::mem::replace(&mut request.residency, empty);
        residency
            .close(&mut hands.owners, &mut Vec::new())?
            .settle(&mut hands.owners)?;
        match ending {
            Ending::Preempted if !self.stopping => {
                hands.tally.preempted += 1;
                self.preempted.push_back(request);
            }
            _ => {
                tracing::debug!(request = number, ?ending, "request ended");
                hands.tally.requests += 1;
                hands.tally.requests_failed += u64::from(ending == Ending::Failed);
            }
        }
        Ok(())
    }

    /// Moves every ready request on until it is in flight or waits.
    fn run_ready(&mut self) -> Result<bool, RoundsError> {
        let mut worked = false;
        while self.mode == Mode::Running
            && let Some(number) = self.ready.pop_front()
        {
            let Some(mut request) = self.requests.remove(&number) else {
                continue;
            };
            let launch = self.launch(&mut request);
            self.requests.insert(number, request);
            match launch? {
                Launch::Flying => worked = true,
                Launch::Blocked(Blocked::Channel) => {
                    self.blocked.push((number, Blocked::Channel));
                    self.interrupt();
                }
                Launch::Blocked(blocked) => self.blocked.push((number, blocked)),
            }
        }
        Ok(worked)
    }

    fn launch(&mut self, request: &mut Request) -> Result<Launch, RoundsError> {
        loop {
            match &request.step {
                Step::Upload if request.finished || request.round >= self.hands.options.rounds => {
                    request.step = Step::End(Ending::Finished);
                }
                Step::Upload => return self.hands.launch_upload(request),
                Step::Retain if request.finished => request.step = Step::End(Ending::Finished),
                Step::Retain => match self.hands.launch_retain(request)? {
                    Some(launch) => return Ok(launch),
                    None => self.end_round(request),
                },
                Step::End(ending) => return self.hands.launch_end(request, *ending),
                Step::Uploading(_) | Step::Retaining(_) | Step::Ended(_) => return Ok(Launch::Flying),
            }
        }
    }

    /// Admits the next request where there is room for it.
    fn admit(&mut self) -> Result<bool, RoundsError> {
        let waits = self.blocked.iter().any(|(_, blocked)| *blocked != Blocked::Ring);
        if waits || self.stopping || self.requests.len() >= self.hands.options.concurrency as usize {
            return Ok(false);
        }
        let mut request = match self.preempted.pop_front() {
            Some(request) => request,
            None => match self.next_of_trace()? {
                Some(request) => request,
                None => return Ok(false),
            },
        };
        if !self.requests.is_empty() && !self.hands.has_room(&request) {
            self.preempted.push_front(request);
            return Ok(false);
        }
        let number = request.number;
        self.epochs += 1;
        // X22: epochs order across restarts.
        let incarnation = self.hands.producer.incarnation().get();
        let epoch = RequestEpoch(incarnation << 32 | self.epochs);
        self.hands.ledger.open(&request.id, epoch)?;
        request.begin(epoch, self.hands.producer.generation(), &self.hands.layers);
        self.requests.insert(number, request);
        self.ready.push_back(number);
        Ok(true)
    }

    fn next_of_trace(&mut self) -> Result<Option<Request>, RoundsError> {
        let enough = self
            .hands
            .options
            .requests
            .is_some_and(|requests| self.admitted >= requests);
        if self.trace_over || enough {
            self.trace_over = true;
            return Ok(None);
        }
        let Some(next) = self.trace.next() else {
            self.trace_over = true;
            return Ok(None);
        };
        let number = self.admitted;
        self.admitted += 1;
        // A record names all its sources at once, so a sequence is cut to what the pool holds.
        let frames = (0..self.hands.owners.all().len() as u32).map(|group| self.hands.store.frames(GroupId(group)));
        Ok(Some(Request::new(
            number,
            &next?,
            frames.min().unwrap_or(0),
            &self.hands.options,
        )))
    }

    /// Where requests wait for device blocks that only other waiting requests hold, the younger give theirs back.
    fn make_room(&mut self, worked: bool) -> Result<(), RoundsError> {
        let pinning = self.pinned_bytes < self.hands.map.pool_bytes();
        if worked || self.blocked.is_empty() || !self.hands.flights.is_empty() || pinning {
            return Ok(());
        }
        // Nothing is in flight, so nothing but this makes room: the youngest that holds blocks gives them back.
        let waiting = self.blocked.iter().filter_map(|(number, _)| self.requests.get(number));
        let holder = waiting
            .filter(|request| request.can_begin_again())
            .max_by_key(|request| request.number);
        if let Some(number) = holder.map(|request| request.number) {
            self.blocked.retain(|(other, _)| *other != number);
            if let Some(request) = self.requests.get_mut(&number) {
                request.step = Step::End(Ending::Preempted);
            }
            self.ready.push_front(number);
            self.run_ready()?;
            return Ok(());
        }
        let first = self.blocked.iter().min_by_key(|(number, _)| *number);
        match first.and_then(|(number, blocked)| Some((self.requests.get(number)?, *blocked))) {
            Some((request, blocked)) if blocked != Blocked::Channel && self.requests.len() == 1 => {
                Err(RoundsError::TooSmall {
                    request: request.number,
                    round: request.round,
                    blocked: match blocked {
                        Blocked::Device => "the device pool is too small (--device-blocks)",
                        Blocked::Host => {
                            "the host pool or its gather region is too small (--source-blocks, --gather-blocks)"
                        }
                        Blocked::Ring | Blocked::Channel => "the plan ring is too small (--ring-bytes)",
                    },
                })
            }
            _ => {
                // None of them holds anything: one after the other they fit.
                self.blocked.sort_unstable_by_key(|(number, _)| *number);
                self.ready.extend(self.blocked.drain(..).map(|(number, _)| number));
                self.run_ready()?;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests;
