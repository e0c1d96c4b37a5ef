//! The world of one run: a ledger, owners, three requests, the ranks and the network between them.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::num::NonZeroU32;

use kvsluice_cpu_worker::invariants::{
    RankView, check_in_flight, check_ledger, check_order, check_references, check_residency, check_restored,
};
use kvsluice_cpu_worker::ledger::{Ack, Finished, Ledger, OperationKey};
use kvsluice_cpu_worker::owner::{Owners, Reference};
use kvsluice_cpu_worker::planner::Planner;
use kvsluice_cpu_worker::residency::{Abandoned, Residency};
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, PhysicalBlock, PoolGeneration, RequestEpoch, SelectionRevision,
};

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

pub(crate) const GENERATION: PoolGeneration = PoolGeneration(6);
pub(crate) const SEQ_BLOCKS: u32 = 10;
pub(crate) const POOL_BLOCKS: u32 = 24;
/// (layer, group, active): two full-attention groups and a sliding-window layer.
pub(crate) const LAYERS: [(u32, u32, bool); 4] = [(0, 0, true), (1, 0, true), (2, 5, false), (3, 5, true)];
/// Ids with equal beginnings, with hyphens and without (R49).
pub(crate) const NAMES: [&str; 3] = ["run-7-a", "run-7-b", "solo"];

pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what().into()) }
}

/// What the driver knows of one operation, apart from the ledger.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) key: OperationKey,
    pub(crate) revision: SelectionRevision,
    pub(crate) acked: BTreeSet<u32>,
    pub(crate) state: KnownState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KnownState {
    Pending,
    Committed,
    Aborted,
}

pub(crate) struct Request {
    pub(crate) name: &'static str,
    pub(crate) epoch: RequestEpoch,
    /// `None` once finished.
    pub(crate) residency: Option<Residency>,
    pub(crate) finishing: bool,
    pub(crate) operations: BTreeMap<u64, Known>,
    /// The residency before the pending operation was staged.
    pub(crate) before: Option<Residency>,
    pub(crate) ranks: Vec<RankView>,
}

/// An operation that a rank has received and not carried out.
pub(crate) struct Execution {
    pub(crate) request: usize,
    pub(crate) rank: u32,
    pub(crate) key: OperationKey,
    pub(crate) view: RankView,
    pub(crate) destinations: Vec<(GroupId, PhysicalBlock)>,
    pub(crate) serial: u64,
}

pub(crate) struct World {
    pub(crate) rng: fastrand::Rng,
    pub(crate) ranks: u32,
    pub(crate) ledger: Ledger,
    pub(crate) owners: Owners,
    pub(crate) planner: Planner,
    pub(crate) requests: Vec<Request>,
    pub(crate) executions: Vec<Execution>,
    pub(crate) messages: Vec<(usize, Ack)>,
    pub(crate) abandoned: Vec<(u64, Abandoned)>,
    pub(crate) sharers: Vec<(GroupId, PhysicalBlock, Reference)>,
    pub(crate) serial: u64,
    /// R47: random draws made for staged operations.
    pub(crate) draws: u64,
    pub(crate) accepted: u64,
    pub(crate) commits: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let ranks = rng.u32(1..=8);
        let request = |name| Request {
            name,
            epoch: RequestEpoch(0),
            residency: None,
            finishing: false,
            operations: BTreeMap::new(),
            before: None,
            ranks: Vec::new(),
        };
        Self {
            rng,
            ranks,
            ledger: Ledger::new(NonZeroU32::new(ranks).unwrap_or(NonZeroU32::MIN)),
            owners: Owners::new([
                (GroupId(0), BlockCount(POOL_BLOCKS)),
                (GroupId(5), BlockCount(POOL_BLOCKS)),
            ]),
            planner: Planner::new(),
            requests: NAMES.map(request).into(),
            executions: Vec::new(),
            messages: Vec::new(),
            abandoned: Vec::new(),
            sharers: Vec::new(),
            serial: 0,
            draws: 0,
            accepted: 0,
            commits: 0,
        }
    }

    pub(crate) fn step(&mut self) -> Outcome {
        let request = self.rng.usize(0..NAMES.len());
        match self.rng.u32(0..100) {
            0 => self.open(request),
            1..=16 => self.upload(request),
            17..=26 => self.retain(request),
            27..=29 => self.retry(request),
            30..=57 => self.execute(),
            58..=87 => self.deliver(),
            88..=91 => self.made_up_ack(request),
            92..=93 => self.abort(request),
            94 => self.finish(request),
            _ => self.share(),
        }?;
        self.check()
    }

    pub(crate) fn open(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let stale = self.ledger.open(request.name.as_bytes(), request.epoch);
        ensure(request.epoch.get() == 0 || stale.is_err(), || {
            format!("{} was opened twice", request.name)
        })?;
        request.epoch = RequestEpoch(request.epoch.get() + self.rng.u64(1..3));
        self.ledger.open(request.name.as_bytes(), request.epoch)?;
        let layers = LAYERS.map(|(layer, group, _)| (DecoderLayer(layer), GroupId(group)));
        let fresh = Residency::new(request.epoch, GENERATION, layers);
        let view = RankView {
            map_revision: fresh.map_revision(),
            revision: fresh.revision(),
            tables: fresh.tables().to_vec(),
        };
        request.ranks = vec![view; self.ranks as usize];
        request.operations.clear();
        request.finishing = false;
        request.before = None;
        let old = request.residency.replace(fresh);
        self.close(index, old)
    }

    /// Gives up a life's blocks; what it had staged waits for the ranks (I6).
    pub(crate) fn close(&mut self, index: usize, residency: Option<Residency>) -> Outcome {
        let Some(residency) = residency else { return Ok(()) };
        let key = residency.pending_upload().or(residency.pending_retain());
        let abandoned = residency.close(&mut self.owners, &mut Vec::new())?;
        self.abandon(index, key, abandoned)
    }

    pub(crate) fn abandon(&mut self, index: usize, key: Option<OperationKey>, abandoned: Abandoned) -> Outcome {
        let of_operation = |execution: &&Execution| execution.request == index && Some(execution.key) == key;
        let serial = self.executions.iter().find(of_operation).map(|found| found.serial);
        self.abandoned.push((serial.unwrap_or(0), abandoned));
        self.settle()
    }

    /// Gives abandoned destinations back once no rank has the operation before it any more.
    pub(crate) fn settle(&mut self) -> Outcome {
        let running: BTreeSet<u64> = self.executions.iter().map(|execution| execution.serial).collect();
        let early = with_early_settle();
        for (serial, abandoned) in std::mem::take(&mut self.abandoned) {
            if running.contains(&serial) && !early {
                self.abandoned.push((serial, abandoned));
            } else {
                abandoned.settle(&mut self.owners)?;
            }
        }
        Ok(())
    }

    pub(crate) fn abort(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let Some(known) = request
            .operations
            .values_mut()
            .find(|known| known.state == KnownState::Pending)
        else {
            return Ok(());
        };
        let aborted = self
            .ledger
            .abort(request.name.as_bytes(), request.epoch, known.key.operation);
        let (Some(aborted), Some(residency)) = (aborted, &mut request.residency) else {
            return Err(format!("{known:?} could not be aborted").into());
        };
        known.state = KnownState::Aborted;
        let key = known.key;
        let abandoned = residency.abort(&aborted)?;
        if let Some(before) = request.before.take() {
            check_restored(&before, residency)?; // I7
        }
        let view = RankView {
            map_revision: residency.map_revision(),
            revision: residency.revision(),
            tables: residency.tables().to_vec(),
        };
        request.ranks.fill(view); // ranks that had applied it go back
        self.abandon(index, Some(key), abandoned)?;
        self.finished(index)
    }

    pub(crate) fn finish(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let pending = request
            .operations
            .values()
            .any(|known| known.state == KnownState::Pending);
        let expected = match (request.residency.is_some(), pending) {
            (false, _) => Finished::Ignored,
            (true, true) => Finished::Draining,
            (true, false) => Finished::Finished,
        };
        let answer = self.ledger.finish(request.name.as_bytes(), request.epoch);
        ensure(answer == expected, || {
            format!("finish gave {answer:?}, not {expected:?}")
        })?;
        request.finishing |= answer == Finished::Draining;
        self.finished(index)
    }

    /// F11: a request that is unknown to the ledger has no tables.
    pub(crate) fn finished(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        if self.ledger.state(request.name.as_bytes()).is_some() {
            return Ok(());
        }
        request.operations.clear();
        request.finishing = false;
        let residency = request.residency.take();
        self.close(index, residency)
    }

    /// Another request, the prefix cache or a replayed graph takes or drops a reference.
    pub(crate) fn share(&mut self) -> Outcome {
        if self.sharers.len() > 6 || (self.rng.bool() && !self.sharers.is_empty()) {
            let choice = self.rng.usize(0..self.sharers.len());
            let (group, block, kind) = self.sharers.swap_remove(choice);
            self.owners.of(group)?.release(block, kind)?;
            return Ok(());
        }
        let group = if self.rng.bool() { GroupId(0) } else { GroupId(5) };
        let block = PhysicalBlock(self.rng.u32(0..POOL_BLOCKS));
        let kind = [Reference::Regular, Reference::Prefix, Reference::Transfer][self.rng.usize(0..3)];
        let owner = self.owners.of(group)?;
        let owned = owner.references(block).total() > 0;
        ensure(owner.acquire(block, kind).is_ok() == owned, || {
            format!("{block:?} is owned: {owned}")
        })?;
        if owned {
            self.sharers.push((group, block, kind));
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), Box<dyn Error>> {
        ensure(self.draws == self.accepted, || {
            format!("{} draws for {}", self.draws, self.accepted)
        })?; // R47
        let live = || {
            self.requests
                .iter()
                .filter_map(|request| Some((request, request.residency.as_ref()?)))
        };
        for (request, residency) in live() {
            check_residency(residency, &self.owners)?;
            let state = self.ledger.state(request.name.as_bytes());
            let state = state.ok_or_else(|| format!("{} has tables and is unknown", request.name))?;
            check_ledger(&state, residency)?;
            for rank in &request.ranks {
                check_order(&state, rank, state.pending.is_none())?;
            }
        }
        let named = live().flat_map(|(_, residency)| residency.tables()).flat_map(|table| {
            table
                .named()
                .iter()
                .map(|block| (table.group(), *block, Reference::Layer))
        });
        let staged = live().flat_map(|(_, residency)| residency.destinations().iter().chain(residency.replaced()));
        let waiting = self.abandoned.iter().flat_map(|(_, abandoned)| abandoned.blocks());
        let transfers = staged
            .chain(waiting)
            .map(|&(group, block)| (group, block, Reference::Transfer));
        check_references(&self.owners, named.chain(transfers).chain(self.sharers.iter().copied()))?;
        let in_flight = self.executions.iter().flat_map(|execution| {
            execution
                .destinations
                .iter()
                .map(|&(group, block)| (execution.serial, group, block))
        });
        check_in_flight(&self.owners, in_flight)?;
        Ok(())
    }

    /// F12: when every request has finished and every transfer ended, the whole pool is free.
    pub(crate) fn wind_down(&mut self) -> Outcome {
        for index in 0..NAMES.len() {
            self.finish(index)?;
        }
        while !self.executions.is_empty() {
            self.execute()?;
            self.check()?;
        }
        while !self.messages.is_empty() {
            self.deliver()?;
            self.check()?;
        }
        for (group, block, kind) in std::mem::take(&mut self.sharers) {
            self.owners.of(group)?.release(block, kind)?;
        }
        self.check()?;
        let free = self
            .owners
            .all()
            .iter()
            .all(|owner| owner.free_blocks() == BlockCount(POOL_BLOCKS));
        ensure(
            free && self.requests.iter().all(|request| request.residency.is_none()),
            || "F12: not free".to_owned(),
        )
    }
}

/// A fault of the driver itself: destinations of an aborted operation go back while ranks still write them.
fn with_early_settle() -> bool {
    kvsluice_layout::planted::planted("driver_settles_early")
}
