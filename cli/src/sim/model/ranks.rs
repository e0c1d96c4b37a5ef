//! What the ranks stored: joins, losses, takeovers, and every answer.

use kvsluice_layout::record::Kind;
use kvsluice_layout::region::{CONSUMED_AT, RANK_GENERATION_AT, SLOTS_AT};

use super::{Answer, DONE, FAILED, Left, Model, REJECTED, Record, SUPERSEDED, Seat, Violation, check};
use crate::sim::memory::Stored;

impl Model {
    /// A worker has joined; `first` is its first record.
    pub(in crate::sim) fn joined(&mut self, rank: u32, epoch: u64, first: u64, faulty: bool) -> Result<(), Violation> {
        check(first == self.tail, "X24 a worker joins at the tail", || {
            format!("rank {rank} at {first}")
        })?;
        if let Some(seat) = self.seats.get_mut(rank as usize) {
            *seat = Some(Seat {
                epoch,
                first,
                consumed: first,
                generation: 0,
                left: None,
                wild: false,
                faulty,
            });
        }
        Ok(())
    }

    /// A dead worker was taken off its rank: it answers nothing any more.
    pub(in crate::sim) fn lost(&mut self, rank: u32) {
        self.unseat(rank, false);
    }

    /// A rank's segment is being scribbled over.
    pub(in crate::sim) fn scribbled(&mut self, rank: u32) {
        if let Some(Some(seat)) = self.seats.get_mut(rank as usize) {
            seat.wild = true;
        }
        // What it has answered may be overwritten before the producer reads it.
        self.replace(rank, |answer| match answer {
            Answer::Owed | Answer::Given(..) => Answer::Wild,
            other => other,
        });
    }

    pub(super) fn unseat(&mut self, rank: u32, forget: bool) {
        if let Some(seat) = self.seats.get_mut(rank as usize) {
            *seat = None;
        }
        self.replace(rank, |answer| match answer {
            Answer::Given(..) | Answer::Wild if !forget => answer,
            _ => Answer::Lost,
        });
    }

    pub(super) fn replace(&mut self, rank: u32, change: impl Fn(Answer) -> Answer) {
        let positions: Vec<u64> = self.records.keys().copied().collect();
        for position in positions {
            if let Some(answer) = self
                .records
                .get_mut(&position)
                .and_then(|record| record.answers.get_mut(rank as usize))
            {
                *answer = change(*answer);
            }
            self.settle(position);
        }
    }

    /// A takeover begins: `producer` is its epoch, `alive` the epochs of the workers that live. The ranks without one
    /// have lost all that they owed, and what they had answered too: their segments are gone.
    pub(in crate::sim) fn takes_over(&mut self, producer: u64, alive: &[Option<u64>]) {
        for rank in 0..self.ranks {
            let lives = alive.get(rank as usize).copied().flatten();
            match self.seat(rank) {
                Some(seat) if Some(seat.epoch) == lives => {
                    let first = seat.first;
                    let older: Vec<u64> = self.records.range(..first).map(|(position, _)| *position).collect();
                    for position in older {
                        let answer = self.records.get_mut(&position);
                        if let Some(answer) = answer.and_then(|record| record.answers.get_mut(rank as usize)) {
                            *answer = Answer::Lost;
                        }
                    }
                }
                _ => self.unseat(rank, true),
            }
        }
        // What is out of the journal is not reported again: it was over.
        self.records = self.records.split_off(&self.reclaim);
        self.incarnation += 1;
        self.producer = producer;
        self.expects_incarnation = true;
    }

    /// A takeover is over: what it found is what there is.
    pub(in crate::sim) fn took_over(
        &mut self,
        tail: u64,
        in_flight: usize,
        members: &[(u64, u64)],
    ) -> Result<(), Violation> {
        check(tail == self.tail, "X10 a takeover finds the tail", || {
            format!("{tail}, expected {}", self.tail)
        })?;
        // Records that were over when it looked have left already.
        let most = self.records.len();
        let least = self.records.values().filter(|record| !record.settled).count();
        check(
            (least..=most).contains(&in_flight),
            "X25 a takeover finds what is in flight",
            || format!("{in_flight} records, expected {least} to {most}"),
        )?;
        for (rank, (seat, found)) in self.seats.iter().zip(members).enumerate() {
            let expected = seat.as_ref().map(|seat| (seat.epoch, seat.first));
            let same = expected.is_none_or(|expected| expected == *found);
            check(same, "X24 a takeover finds the members", || {
                format!("rank {rank}: {found:?}, {expected:?}")
            })?;
        }
        Ok(())
    }

    /// Epoch of the worker that the membership names.
    pub(in crate::sim) fn seated(&self, rank: u32) -> Option<u64> {
        self.seat(rank).map(|seat| seat.epoch)
    }

    // The workers.

    /// What a rank's worker stored in one action.
    pub(in crate::sim) fn rank_stored(&mut self, rank: u32, epoch: u64, log: &[Stored]) -> Result<(), Violation> {
        if self.seat(rank).is_none_or(|seat| seat.wild || seat.epoch != epoch) {
            return Ok(());
        }
        for stored in log {
            match *stored {
                Stored::Word { at: CONSUMED_AT, word } => self.consumed(rank, word)?,
                Stored::Word {
                    at: RANK_GENERATION_AT,
                    word,
                } => {
                    if let Some(Some(seat)) = self.seats.get_mut(rank as usize) {
                        seat.stores_generation(word);
                    }
                }
                Stored::Commit { at, line } => self.answered(rank, at, &line)?,
                Stored::Word { .. } | Stored::Lines { .. } => {}
            }
        }
        Ok(())
    }

    pub(super) fn consumed(&mut self, rank: u32, to: u64) -> Result<(), Violation> {
        let Some(Some(seat)) = self.seats.get_mut(rank as usize) else {
            return Ok(());
        };
        let from = seat.consumed;
        if to == seat.first && from == to {
            return Ok(()); // the port's first store
        }
        let record = self.records.get(&from).filter(|record| record.published);
        let expected = record.map(|record| from + record.bytes);
        seat.consumed = to;
        check(
            expected == Some(to),
            "X12 every rank consumes every record once, in order",
            || format!("rank {rank} from {from} to {to}, expected {expected:?}"),
        )
    }

    pub(super) fn answered(&mut self, rank: u32, at: usize, line: &[u64; 8]) -> Result<(), Violation> {
        let [commit, identity, producer, worker, status, _, _, digest] = *line;
        let position = commit.wrapping_sub(1);
        let status = (status & 0xff) as u8;
        let Some(seat) = self.seat(rank) else { return Ok(()) };
        let (consumed, epoch, faulty) = (seat.consumed, seat.epoch, seat.faulty);
        let generation = seat.generation_of(position);
        let leaves = seat.left.is_some_and(|left| left.cause.is_none());
        let Some(record) = self.records.get(&position) else {
            return check(false, "X12 an answer answers a record", || {
                format!("rank {rank} at {position}")
            });
        };
        let said = || format!("rank {rank}, {:?} at {position}: {line:x?}", record.kind());
        let answer = record.answers.get(rank as usize).copied();
        check(answer == Some(Answer::Owed), "X12 a terminal is written once", || {
            format!("{}: {answer:?}", said())
        })?;
        check(
            at == SLOTS_AT + (position % self.ring.1) as usize,
            "X12 a record answers in the slot of its line",
            said,
        )?;
        let whole = identity == record.checksum && producer == record.producer && worker == epoch;
        check(whole, "X12 an answer is committed when it is whole", said)?;
        check(
            consumed >= position + record.bytes,
            "X12 a record is consumed before its terminal",
            said,
        )?;
        check(
            (DONE..=FAILED).contains(&status),
            "X12 a worker writes one of four terminals",
            said,
        )?;
        if let Some(spec) = &record.spec {
            let stale = spec.is_data() && spec.generation != generation;
            check(
                stale == (status == REJECTED),
                "X24a exactly the records of another generation are rejected",
                || format!("{}, the rank is at {generation}", said()),
            )?;
            let changes = matches!(spec.kind, Kind::Keep | Kind::Retain) && status == FAILED;
            check(
                !leaves || changes,
                "R59 a rank leaves its generation where a change of tables fails",
                said,
            )?;
            let ended = record.aborted || self.last_reset > position;
            check(
                status != SUPERSEDED || ended,
                "X15 only an Abort or a Reset supersedes",
                said,
            )?;
            check(
                status != FAILED || faulty,
                "X13 nothing fails on a device that works",
                said,
            )?;
            if spec.kind == Kind::Abort {
                let open = self
                    .records
                    .get(&spec.target)
                    .and_then(|target| target.answers.get(rank as usize));
                check(
                    open != Some(&Answer::Owed),
                    "X15 an Abort ends after its operation",
                    said,
                )?;
            }
            if spec.kind == Kind::Reset && status == DONE {
                let owed = |record: &Record| record.answers.get(rank as usize) == Some(&Answer::Owed);
                let earlier = self.records.range(..position).find(|(_, record)| owed(record));
                check(earlier.is_none(), "X24a a Reset drains every earlier record", || {
                    format!("{}, open at {:?}", said(), earlier.map(|(position, _)| position))
                })?;
                check(
                    generation == spec.generation,
                    "X24a the generation is stored before the terminal",
                    said,
                )?;
            }
        }
        if let Some(record) = self.records.get_mut(&position)
            && let Some(answer) = record.answers.get_mut(rank as usize)
        {
            *answer = Answer::Given(status, digest);
        }
        if let Some(Some(seat)) = self.seats.get_mut(rank as usize)
            && let Some(left) = &mut seat.left
        {
            left.cause.get_or_insert(position);
        }
        self.seen.answers += 1;
        self.settle(position);
        Ok(())
    }
}

impl Seat {
    fn stores_generation(&mut self, generation: u64) {
        let (was, consumed) = (self.generation, self.consumed);
        self.generation = generation;
        if generation > 0 {
            self.left = None;
        } else if was > 0 {
            self.left = Some(Left {
                generation: was,
                consumed,
                cause: None,
                known: false,
            });
        }
    }

    /// The generation that the rank was at when it consumed the record at `position`.
    fn generation_of(&self, position: u64) -> u64 {
        let before = self.left.filter(|left| position < left.consumed);
        before.map_or(self.generation, |left| left.generation)
    }

    /// Whether the producer may take it for one at `generation`.
    pub(super) fn is_at(&self, generation: u64) -> bool {
        let unheard = self.left.filter(|left| !left.known);
        self.wild || self.generation == generation || unheard.is_some_and(|left| left.generation == generation)
    }
}
