//! What must hold, and what happens where a process dies.

use super::*;

impl World {
    pub(super) fn producer_does<T>(&mut self, act: impl FnOnce(&mut Side) -> T) -> Option<T> {
        let done = until_crash(|| act(&mut self.producer));
        if done.is_none() {
            for rank in (0..self.ranks()).map(Rank) {
                let found = read_member(&self.control, &self.map, rank);
                let whole = (found.epoch == Member::MISSING.epoch) == (found.first == Member::MISSING.first);
                assert!(
                    whole,
                    "{}: crash: rank {rank}: {found:?} is a mixture (X24)",
                    self.label
                );
            }
            // What was being written when it died is visible with the rest of its batch, or does not exist.
            let visible = self.visible();
            let unpublished = self.records.iter().filter(|record| !record.published);
            if let Some(&last) = visible.last()
                && visible.len() == unpublished.count()
                && self.records.last().is_some_and(|record| record.position == UNKNOWN)
            {
                self.written_at(last);
            }
            let unpublished = self.records.iter().filter(|record| !record.published);
            let batch: Vec<_> = unpublished.map(|record| record.position).collect();
            assert!(
                visible.is_empty() || visible == batch,
                "{}: crash: visible {visible:?} of the batch {batch:?} (X10)",
                self.label
            );
            if visible.is_empty() {
                self.records.retain(|record| record.published);
            }
            self.published();
            self.successor();
        }
        done
    }

    /// A producer takes over, and so on until one lives through it.
    pub(super) fn successor(&mut self) {
        let mut taken = None;
        while taken.is_none() {
            self.crashes += 1;
            self.names += 1;
            let epoch = ProcessEpoch(0xA000 + self.names);
            let alive = |(worker, rank): (&Option<Worker>, u32)| {
                let worker = worker.as_ref().filter(|worker| worker.port.is_some())?;
                Some((
                    Rank(rank),
                    worker.segment.memory.clone(),
                    worker.member.epoch,
                    worker.pid,
                ))
            };
            let survivors = self.workers.iter().zip(0..).filter_map(alive).collect();
            let (control, map) = (self.control.clone(), self.map.clone());
            let leases = LeaseTable::new(&self.geometry);
            taken = until_crash(|| Producer::take_over(control, map, leases, epoch, survivors));
        }
        let label = &self.label;
        self.producer = match taken {
            Some(Ok(producer)) => producer,
            Some(Err(error)) => panic!("{label}: takeover: {error}"),
            None => return,
        };
        let incarnation = self.producer.incarnation().0;
        assert!(incarnation > self.incarnation, "{label}: the incarnation grows (X22)");
        self.incarnation = incarnation;
        self.seen.insert("takeover".into());
        for index in 0..self.workers.len() {
            let seated = self.producer.member(Rank(index as u32));
            match &mut self.workers[index] {
                Some(Worker {
                    member,
                    port: Some(port),
                    ..
                }) => {
                    assert_eq!(*member, seated, "{label}: rank {index} keeps its seat (X24)");
                    port.accept_producer(self.producer.epoch());
                }
                gone => *gone = None,
            }
            for record in &mut self.records {
                if record.position < seated.first {
                    record.answers[index] = Answer::Lost;
                }
            }
        }
        assert_eq!(
            self.producer.tail(),
            self.published_to,
            "{label}: the tail is behind the last commit (X10)"
        );
        self.after_producer();
        if planted("x25_republish") {
            let owed: Vec<_> = self.records.iter().filter(|record| record.is_owed()).collect();
            let drafts: Vec<_> = owed.iter().map(|record| record.draft.clone()).collect();
            drafts.iter().for_each(|draft| _ = self.publish(draft));
        }
    }

    pub(super) fn worker_does<T>(
        &mut self,
        rank: u32,
        act: impl FnOnce(&mut Port<Heap, Counting<Heap>>) -> T,
    ) -> Option<T> {
        let port = self.workers[rank as usize].as_mut()?.port.as_mut()?;
        let done = until_crash(|| act(port));
        if done.is_none() {
            self.kill_worker(rank);
        }
        done
    }

    /// Drops the records that no takeover can find any more.
    pub(super) fn forget(&mut self) {
        let reclaim = Position(self.control.load(RECLAIM_AT));
        let kept: BTreeSet<Position> = self.in_flight().map(|record| record.position).collect();
        let ended = |record: &Record| record.ended_in.is_some() && !kept.contains(&record.position);
        self.records
            .retain(|record| record.position >= reclaim || !ended(record));
    }

    pub(super) fn answered(&mut self, rank: u32, position: Position, terminal: Terminal) {
        let record = self.records.iter_mut().find(|record| record.position == position);
        if let Some(record) = record {
            record.answers[rank as usize] = Answer::Given(terminal);
            self.seen.insert(format!("{:?} {terminal:?}", record.kind));
        }
    }

    /// Every record written is published.
    pub(super) fn published(&mut self) {
        self.records.iter_mut().for_each(|record| record.published = true);
        self.published_to = self.records.last().map_or(self.published_to, |record| {
            self.published_to.max(Position(record.position.0 + record.bytes))
        });
    }

    /// Positions of the records that a reader finds behind the published ones, padding left out.
    pub(super) fn visible(&self) -> Vec<Position> {
        let mut found = Vec::new();
        let mut at = self.published_to.0;
        loop {
            let word = self.shape.at + self.shape.offset(at);
            if self.control.load(word) != at + 1 {
                return found;
            }
            let (bytes, kind) = (
                self.control.load(word + 16) as u32,
                (self.control.load(word + 16) >> 32) as u16,
            );
            assert!(
                bytes >= 64,
                "{}: a record of {bytes} bytes is visible at {at}",
                self.label
            );
            if kind != Kind::Padding as u16 {
                found.push(Position(at));
            }
            at += u64::from(bytes);
        }
    }

    pub(super) fn after_producer(&mut self) {
        while let Some(completion) = self.producer.next_completion() {
            self.ended(&completion);
        }
        self.check();
    }

    pub(super) fn ended(&mut self, completion: &Completion) {
        let Completion { position, terminal, .. } = *completion;
        let label = &self.label;
        let record = self.records.iter_mut().find(|record| record.position == position);
        let record = record.unwrap_or_else(|| panic!("{label}: {position} ended and was never published"));
        let answers = &record.answers;
        assert!(
            !record.is_owed(),
            "{label}: {position} ended before its last rank: {answers:?} (X12)"
        );
        assert_eq!(
            terminal,
            record.worst(),
            "{label}: {position}: the worst of {answers:?} (X12)"
        );
        assert_ne!(
            record.ended_in,
            Some(self.incarnation),
            "{label}: {position} ended twice (X12)"
        );
        let recovered = record.tracked_in != self.incarnation;
        assert_eq!(completion.recovered, recovered, "{label}: {position} recovered");
        assert_eq!(
            completion.operation, record.operation,
            "{label}: {position}: its operation"
        );
        record.ended_in = Some(self.incarnation);
        if completion.recovered {
            self.seen.insert("recovered".into());
        }
        self.seen.insert(format!("ended {:?} {terminal:?}", completion.kind));
    }

    /// Records that hold their leases: owed themselves, or named by an Abort that is (X15).
    pub(super) fn in_flight(&self) -> impl Iterator<Item = &Record> {
        let aborting = |position| {
            let names_it = move |abort: &&Record| abort.target == Some(position);
            self.records.iter().filter(names_it).any(Record::is_owed)
        };
        self.records
            .iter()
            .filter(move |record| record.is_owed() || aborting(record.position))
    }

    /// Blocks that the producer may still hold: it has not looked at every answer yet.
    pub(super) fn blocks_held(&self) -> impl Iterator<Item = Block> {
        let open = |record: &Record| record.ended_in != Some(self.incarnation);
        let aborting = move |position| {
            let names_it = |abort: &Record| abort.target == Some(position) && open(abort);
            self.records.iter().any(names_it)
        };
        let held = move |record: &&Record| open(record) || aborting(record.position);
        let records = self.records.iter().filter(held);
        records.flat_map(|record| record.reads.union(&record.writes).copied())
    }

    pub(super) fn blocks_in_flight(&self) -> impl Iterator<Item = Block> {
        self.in_flight()
            .flat_map(|record| record.reads.union(&record.writes).copied())
    }

    pub(super) fn check(&self) {
        let label = &self.label;
        let leases = self.producer.leases();
        for block in self.blocks_in_flight() {
            let held = match block {
                Block::Host(id) => leases.source_leases(GROUP, SourceBlock(id)),
                Block::Device(id) => leases.device_leases(GROUP, PhysicalBlock(id)),
            };
            assert!(held > 0, "{label}: {block:?} is free while a rank may touch it (X14)");
        }
        let reclaim = self.control.load(RECLAIM_AT);
        for record in self.in_flight().filter(|record| record.published) {
            let position = record.position;
            assert!(
                reclaim <= position.0,
                "{label}: reclaim {reclaim} passed {position} (X11)"
            );
            let word = self.shape.at + self.shape.offset(position.0);
            assert_eq!(
                self.control.load(word),
                position.0 + 1,
                "{label}: {position} was overwritten (X11)"
            );
        }
        for (worker, rank) in self.workers.iter().zip(0..) {
            let member = read_member(&self.control, &self.map, Rank(rank));
            let seated = worker.as_ref().map_or(Member::MISSING, |worker| worker.member);
            assert_eq!(member, seated, "{label}: rank {rank}: membership (X24)");
        }
    }
}

/// What a draft reads and writes, by the kinds of X6.
pub(super) fn blocks_of(draft: &PlanDraft) -> (BTreeSet<Block>, BTreeSet<Block>) {
    let rows = draft.lease_rows();
    let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
    for row in rows.rows {
        let from = row.pairs_at as usize;
        for &Pair { source, destination } in &rows.pairs[from..from + row.valid as usize] {
            match (rows.kind, rows.mode) {
                (Kind::Upload, _) => {
                    reads.insert(Block::Host(source));
                    writes.insert(Block::Device(destination));
                }
                (Kind::WriteBack, _) => {
                    reads.insert(Block::Device(source));
                    writes.insert(Block::Host(destination));
                }
                (Kind::Retain, Some(RetainMode::ByteMove)) => {
                    writes.insert(Block::Device(source));
                    writes.insert(Block::Device(destination));
                }
                _ => {
                    assert!(source == NEW_SLOT || source < BLOCKS);
                    reads.insert(Block::Device(destination));
                }
            }
        }
    }
    (reads, writes)
}
