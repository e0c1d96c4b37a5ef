//! What the workers do, and how everything comes to its end.

use super::*;

impl World {
    /// A worker takes its next record. False where there is none.
    pub(crate) fn receive(&mut self, rank: u32) -> bool {
        let Some(received) = self.worker_does(rank, Port::receive) else {
            return false;
        };
        let label = &self.label;
        let ticket = match received {
            Ok(None) => return false,
            Ok(Some(Incoming::Plan(ticket))) => ticket,
            other => panic!("{label}: rank {rank}: {other:?}"),
        };
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return false;
        };
        let position = ticket.position();
        let due = |record: &&mut Record| !record.received[index] && record.position >= worker.member.first;
        let next = self.records.iter_mut().find(due);
        let next = next.unwrap_or_else(|| panic!("{label}: rank {rank} received {position}, which nobody published"));
        assert_eq!(
            next.position, position,
            "{label}: rank {rank}: each record once, in order (X10)"
        );
        assert!(next.published, "{label}: rank {rank} sees {position} before its commit");
        next.received[index] = true;
        let again = !self.applied.insert((rank, next.operation.operation_id));
        assert!(
            !again || next.kind == Kind::Reset,
            "{label}: rank {rank}: {} twice",
            next.operation.operation_id
        );
        let (reads, writes) = (next.reads.clone(), next.writes.clone());
        for ticket in &worker.open {
            let running = self.records.iter().find(|record| record.position == ticket.position());
            let running = running.unwrap_or_else(|| panic!("{label}: an open ticket of no record"));
            let clash = writes
                .iter()
                .any(|b| running.reads.contains(b) || running.writes.contains(b))
                || reads.iter().any(|b| running.writes.contains(b));
            assert!(
                !clash,
                "{label}: rank {rank}: {position} overlaps {} (X9)",
                running.position
            );
        }
        worker.open.push(ticket);
        true
    }

    /// A worker answers one of its open records, the `nth`. A Reset waits for the records before it (X24a), and is Done.
    pub(crate) fn finish(&mut self, rank: u32, nth: usize, outcome: &Outcome) {
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return;
        };
        if worker.open.is_empty() || worker.port.is_none() {
            return;
        }
        let mut nth = nth % worker.open.len();
        if worker.open[nth].kind() == Kind::Reset {
            nth = 0; // Tickets stand in ring order.
        }
        let ticket = worker.open.remove(nth);
        let (position, kind) = (ticket.position(), ticket.kind());
        let done = Outcome::done(0, 0, 0);
        let outcome = if kind == Kind::Reset { &done } else { outcome };
        let record = self.records.iter().find(|record| record.position == position);
        let generation = record.map_or(PoolGeneration(0), |record| record.operation.pool_generation);
        let answered = self.worker_does(rank, |port| {
            if kind == Kind::Reset {
                port.set_generation(generation);
            }
            port.finish(ticket, outcome);
        });
        if answered.is_some() {
            self.answered(rank, position, outcome.terminal);
        }
    }

    /// A worker that misbehaves: a word in its slots that answers nothing, an answer given twice, or one that does not
    /// belong to the record (X16).
    pub(crate) fn lie(&mut self, rank: u32, random: &mut fastrand::Rng) {
        self.poll(); // What was answered before is taken as it was.
        self.lies += 1;
        let index = rank as usize;
        let Some(worker) = &self.workers[index] else { return };
        let (segment, shape) = (worker.segment.memory.clone(), self.shape);
        let slot = |position: Position| SLOTS_AT + shape.offset(position.0);
        let open: Vec<Position> = worker.open.iter().map(Ticket::position).collect();
        let before = self.producer.counts();
        match random.u8(0..3) {
            0 => {
                // Anywhere in the slots: a word no record of that line has or had.
                let Some(&position) = open.get(random.usize(0..open.len().max(1))) else {
                    return;
                };
                let word = [
                    u64::MAX,
                    position.0 + 1 + shape.bytes as u64,
                    position.0 + 65,
                    position.0 + 2,
                ];
                segment.store(slot(position), word[random.usize(0..4)]);
                self.poll();
                assert!(self.producer.counts().stale >= before.stale);
                segment.store(slot(position), 0);
            }
            1 => {
                let given = |record: &&Record| matches!(record.answers[index], Answer::Given(_));
                let Some(answered) = self.records.iter().rfind(given) else {
                    return;
                };
                segment.store_release(slot(answered.position), answered.position.0 + 1);
                segment.store(TERMINALS_AT, segment.load(TERMINALS_AT) + 1);
            }
            _ => {
                let nth = random.usize(0..open.len().max(1));
                let Some(&position) = open.get(nth) else { return };
                if worker.open[nth].kind() == Kind::Reset {
                    return;
                }
                // The identity of no record, or the status of no end.
                for (at, word) in [
                    (8, random.u64(..)),
                    (16, 1),
                    (24, worker.member.epoch.0),
                    (32, random.u64(..)),
                ] {
                    segment.store(slot(position) + at, word);
                }
                segment.store_release(slot(position), position.0 + 1);
                segment.store(TERMINALS_AT, u64::MAX);
                self.answered(rank, position, Terminal::Failed);
                self.conflicts += 1;
                self.poll();
                assert_eq!(
                    self.producer.counts().conflicting,
                    before.conflicting + 1,
                    "{}",
                    self.label
                );
                // Its proper answer comes too late, and changes nothing.
                self.finish_late(rank, nth);
            }
        }
        self.poll();
    }

    pub(super) fn finish_late(&mut self, rank: u32, nth: usize) {
        let Some(worker) = &mut self.workers[rank as usize] else {
            return;
        };
        let ticket = worker.open.remove(nth);
        self.worker_does(rank, |port| port.finish(ticket, &Outcome::done(0, 0, 0)));
    }

    /// Ends a worker; its seat is taken until the producer has noticed.
    pub(crate) fn kill_worker(&mut self, rank: u32) {
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return;
        };
        if worker.port.take().is_none() {
            return;
        }
        self.crashes += 1;
        worker.open.clear();
        // What it had answered is what stands in its slots.
        let segment = worker.segment.memory.clone();
        for record in &mut self.records {
            let slot = SLOTS_AT + self.shape.offset(record.position.0);
            if record.answers[index] == Answer::Owed && segment.load(slot) == record.position.0 + 1 {
                let terminal = Terminal::from_slot(segment.load(slot + 32) as u8).expect("a worker's status");
                record.answers[index] = Answer::Given(terminal);
                self.seen.insert("answered, then died".into());
            }
        }
    }

    // Ends.

    /// Brings everything to its end: every seat filled, every record answered, nothing leased.
    pub(crate) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 8, "{}: does not come to its end", self.label);
            self.flush();
            self.drain_workers();
            let all_live = (0..self.ranks()).all(|rank| self.lives(rank));
            if all_live && self.producer.closed().is_none() && self.producer.in_flight() == 0 {
                break;
            }
            self.revive();
        }
        let label = &self.label;
        assert_eq!(self.producer.leases().leased_blocks(), 0, "{label}: a lease leaked");
        assert_eq!(
            self.producer.reclaim(),
            self.producer.tail(),
            "{label}: ring space leaked"
        );
        for record in &self.records {
            assert!(!record.is_owed(), "{label}: {} was never answered", record.position);
            assert!(record.ended_in.is_some(), "{label}: {} never ended", record.position);
        }
        self.forget();
    }

    /// Receives and answers everything there is, and polls.
    pub(crate) fn drain_workers(&mut self) {
        for rank in 0..self.ranks() {
            while self.receive(rank) {}
            while self.lives(rank) && self.open(rank) > 0 {
                self.finish(rank, 0, &Outcome::done(1, 1, 0));
            }
        }
        self.poll();
    }
}
