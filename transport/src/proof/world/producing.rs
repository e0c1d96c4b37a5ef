//! What the producer does: drafts, publications, polls, seats.

use super::account::blocks_of;
use super::*;

impl World {
    /// A draft's operation: a name of its own, the present generation.
    pub(crate) fn operation(&mut self) -> Operation {
        self.names += 1;
        Operation {
            request_epoch: RequestEpoch(1),
            operation_id: OperationId(self.names),
            pool_generation: self.producer.generation(),
            ..Operation::default()
        }
    }

    /// Device blocks that nobody leases.
    pub(crate) fn free_device_blocks(&self) -> Vec<u32> {
        let free = |b: &u32| self.producer.leases().device_leases(GROUP, PhysicalBlock(*b)) == 0;
        (1..BLOCKS).filter(free).collect()
    }

    /// An upload of `pairs` to each of the first `layers` layers.
    pub(crate) fn upload(&mut self, layers: u32, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.upload(b"request", self.operation());
        let gathered = pairs
            .first()
            .is_some_and(|(source, _)| *source >= BLOCKS - GATHER_BLOCKS);
        let kind = if gathered {
            SourceKind::Copy
        } else {
            SourceKind::SourceOnly
        };
        for layer in 0..layers {
            let pairs = pairs.iter().map(|&(s, d)| (SourceBlock(s), DestinationBlock(d)));
            draft.row(DecoderLayer(layer), GROUP, kind, pairs);
        }
        draft
    }

    /// A plan that moves nothing, of about `bytes` bytes: pairs that are carried and ignored (R24).
    pub(crate) fn ballast(&mut self, bytes: usize) -> PlanDraft {
        let mut draft = PlanDraft::new();
        let pairs = std::iter::repeat_n((SourceBlock(9999), DestinationBlock(9999)), bytes / 8);
        draft.upload(b"ballast", self.operation());
        draft
            .row(DecoderLayer(0), GROUP, SourceKind::SourceOnly, pairs)
            .valid(0);
        draft
    }

    pub(crate) fn keep(&mut self) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.keep(b"request", self.operation());
        draft
    }

    /// A retention: tables over `pairs` of (old slot, block), or moves of (block read, block written).
    pub(crate) fn retain(&mut self, mode: RetainMode, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.retain(b"request", self.operation(), mode);
        let layer = (mode != RetainMode::SharedTable).then_some(DecoderLayer(1));
        let pairs = pairs.iter().map(|&(source, destination)| Pair { source, destination });
        draft.table_row(layer, GROUP, 16, pairs);
        draft
    }

    pub(crate) fn write_back(&mut self, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.write_back(b"request", self.operation(), 0);
        let pairs = pairs.iter().map(|&(source, destination)| Pair { source, destination });
        draft.raw_row(2, GROUP.0, 0, 0, pairs);
        draft
    }

    /// Writes a draft into the open batch. `None` where the producer crashed, else what it refused the draft with.
    pub(crate) fn enqueue(&mut self, draft: &PlanDraft) -> Result<Position, Option<PublishError>> {
        self.write(draft, Producer::enqueue)
    }

    /// Writes a draft and makes it visible, with the open batch before it.
    pub(crate) fn publish(&mut self, draft: &PlanDraft) -> Result<Position, Option<PublishError>> {
        let position = self.write(draft, Producer::publish)?;
        self.published();
        self.after_producer();
        Ok(position)
    }

    pub(super) fn write(
        &mut self,
        draft: &PlanDraft,
        act: fn(&mut Side, &PlanDraft) -> Result<Position, PublishError>,
    ) -> Result<Position, Option<PublishError>> {
        let state = |world: &Self| {
            let producer = &world.producer;
            (producer.tail(), producer.leases().leased_blocks(), producer.in_flight())
        };
        let before = state(self);
        let (reads, writes) = blocks_of(draft);
        self.records.push(Record {
            position: UNKNOWN,
            bytes: draft.encoded_bytes().unwrap_or(0) as u64,
            kind: draft.kind(),
            operation: draft.operation(),
            draft: draft.clone(),
            target: (draft.kind() == Kind::Abort).then(|| Position(draft.target())),
            reads,
            writes,
            published: false,
            answers: Vec::new(),
            received: vec![false; self.workers.len()],
            tracked_in: self.incarnation,
            ended_in: None,
        });
        // A crash settles itself whether the record exists.
        let position = self.producer_does(|producer| act(producer, draft)).ok_or(None)?;
        let position = position.map_err(|error| {
            self.records.pop();
            let label = &self.label;
            assert_eq!(before, state(self), "{label}: a refused draft changes nothing: {error}");
            Some(error)
        })?;
        self.written_at(position);
        self.seen.insert(format!("{:?}", draft.kind()));
        if position > before.0 {
            self.seen.insert("padding at the wrap".into());
        }
        self.after_producer();
        Ok(position)
    }

    /// The last record turns out to lie at `position`, which decides who owes it.
    pub(super) fn written_at(&mut self, position: Position) {
        let owed = |worker: &Option<Worker>| match worker {
            Some(worker) if worker.member.first <= position => Answer::Owed,
            _ => Answer::Lost,
        };
        let answers = self.workers.iter().map(owed).collect();
        if let Some(record) = self.records.last_mut() {
            (record.position, record.answers) = (position, answers);
        }
    }

    /// A refusal must be true.
    pub(crate) fn check_refusal(&self, draft: &PlanDraft, error: &PublishError) {
        let label = &self.label;
        match *error {
            PublishError::Refused(Refusal::DestinationInFlight { id, .. } | Refusal::SourceInFlight { id, .. }) => {
                let (reads, writes) = blocks_of(draft);
                let named: BTreeSet<_> = reads.union(&writes).copied().collect();
                let in_use = |block: Block| matches!(block, Block::Host(b) | Block::Device(b) if b == id);
                let held = self.blocks_held().any(|block| in_use(block) && named.contains(&block));
                assert!(held, "{label}: {error}, and nobody holds it");
            }
            PublishError::Full { needed, free, oldest } => {
                assert!(free < needed, "{label}: {error}");
                let oldest = oldest.unwrap_or_else(|| panic!("{label}: full of nothing"));
                let worker = self.workers[oldest.rank.index()].as_ref();
                assert_eq!(
                    worker.map(|worker| worker.pid),
                    Some(oldest.pid),
                    "{label}: {error} (X17)"
                );
            }
            PublishError::RankMissing { rank, .. } => {
                assert!(self.workers[rank.index()].is_none(), "{label}: {error} (X24)");
            }
            PublishError::ResetNeeded { found, expected, .. } => assert_ne!(found, expected, "{label}: {error} (X24)"),
            ref other => panic!("{label}: {other}"),
        }
    }

    /// Makes the open batch visible.
    pub(crate) fn flush(&mut self) {
        if self.producer_does(Producer::flush).is_some() {
            self.published();
            self.after_producer();
        }
    }

    /// Writes an Abort of the operation at `position`.
    pub(crate) fn abort(&mut self, position: Position) -> Result<Position, Option<PublishError>> {
        let mut draft = PlanDraft::new();
        draft.abort(b"request", self.operation(), position);
        self.enqueue(&draft)
    }

    /// A Reset to the next generation.
    pub(crate) fn reset(&mut self) -> PlanDraft {
        self.generation = self.generation.max(self.producer.generation().0) + 1;
        let mut draft = PlanDraft::new();
        draft.reset(PoolGeneration(self.generation));
        draft
    }

    /// Reads the ranks' answers, also those out of order.
    pub(crate) fn poll(&mut self) {
        self.producer_does(Producer::poll_thorough);
        self.after_producer();
        self.forget();
        // A dead worker may have answered without its hint; a producer learns of that with its death. From one that lies
        // it learns of answers out of order when their turn comes.
        if self.lies == 0 && (0..self.ranks()).all(|rank| self.workers[rank as usize].is_none() || self.lives(rank)) {
            let leased: BTreeSet<Block> = self.blocks_in_flight().collect();
            let found = self.producer.leases().leased_blocks();
            assert_eq!(
                found,
                leased.len(),
                "{}: leased are exactly the blocks in flight (X14)",
                self.label
            );
        }
    }

    /// The producer has proof that the rank's worker is dead.
    pub(crate) fn lose(&mut self, rank: u32) {
        if self.workers[rank as usize].is_none() {
            return;
        }
        self.kill_worker(rank);
        if self.producer_does(|producer| producer.lose(Rank(rank))).is_none() {
            return; // The takeover has found the seat empty.
        }
        self.workers[rank as usize] = None;
        for record in &mut self.records {
            if record.answers[rank as usize] == Answer::Owed {
                record.answers[rank as usize] = Answer::Lost;
            }
        }
        self.after_producer();
    }

    /// The producer notices every dead worker; others take their seats and a Reset.
    pub(crate) fn revive(&mut self) {
        let dead: Vec<u32> = (0..self.ranks()).filter(|rank| !self.lives(*rank)).collect();
        for &rank in &dead {
            self.lose(rank);
            self.join(rank);
        }
        if self.producer.closed().is_some() {
            let reset = self.reset();
            let _ = self.publish(&reset);
            self.drain_workers();
        }
    }

    /// A new worker takes an empty seat, with a fresh segment.
    pub(crate) fn join(&mut self, rank: u32) {
        if self.workers[rank as usize].is_some() {
            return;
        }
        self.names += 1;
        let epoch = ProcessEpoch(0xB000 + self.names);
        let pid = 1000 + self.names as u32;
        let memory = Heap::new(self.map.rank_bytes());
        let taken = memory.clone();
        let Some(first) = self.producer_does(move |producer| producer.join(Rank(rank), taken, epoch, pid)) else {
            return; // Its attach failed half way; it would come again, with another segment.
        };
        self.published();
        self.seen.insert("join".into());
        let segment = Counting {
            memory,
            fuse: self.worker_fuses[rank as usize].clone(),
        };
        let leases = LeaseTable::new(&self.geometry);
        let (control, own, producer) = (self.control.memory.clone(), segment.clone(), self.producer.epoch());
        let port = until_crash(|| Port::new(control, own, self.shape, leases, epoch, producer, first));
        self.crashes += u64::from(port.is_none());
        self.workers[rank as usize] = Some(Worker {
            member: Member { epoch, first },
            pid,
            segment,
            port,
            open: Vec::new(),
        });
        self.after_producer();
    }

    /// The producer dies, and another takes over.
    pub(crate) fn take_over(&mut self) {
        let batch = self.visible();
        assert!(batch.is_empty(), "{}: {batch:?} visible before its commit", self.label);
        self.records.retain(|record| record.published);
        self.successor();
    }
}
