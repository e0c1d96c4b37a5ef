//! From the ranks' answers to completions, leases and ring space (X11, X12, X15, X16).

use kvsluice_layout::ids::{Position, Rank};
use kvsluice_layout::plan::{Operation, Plan};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal, TerminalSlot};
use kvsluice_layout::region::TERMINALS_AT;

use super::{Completion, Digests, InFlight, Producer};
use crate::shared::{Shared, SharedMut};
use crate::slots::{SlotState, prefetch_slot, read_slot};

/// How many answers ahead a producer asks for while it finds them.
const SLOTS_AHEAD: usize = 4;

impl<C: SharedMut, R: Shared> Producer<C, R> {
    /// Ends the records of a journal that no rank owes: once all are tracked, since an Abort further on may hold the
    /// leases of an earlier one (X15).
    pub(crate) fn complete_unowed(&mut self) {
        for at in 0..self.in_flight.len() {
            if self.in_flight[at].pending == 0 {
                self.complete(at);
            }
        }
    }

    pub(super) fn poll_ranks(&mut self, thorough: bool) -> usize {
        let shape = self.ring.shape();
        let mut advanced = false;
        for index in 0..self.ranks.len() {
            let rank = Rank(index as u32);
            let bit = 1_u64 << index;
            let end = self.first_sequence + self.in_flight.len() as u64;
            loop {
                let state = &mut self.ranks[index];
                state.cursor = state.cursor.max(self.first_sequence);
                if state.cursor == end {
                    break;
                }
                let at = (state.cursor - self.first_sequence) as usize;
                let op = &self.in_flight[at];
                if op.pending & bit == 0 {
                    state.cursor += 1;
                    continue;
                }
                let Some(segment) = &state.segment else { break };
                match read_slot(segment, shape, Position(op.position)) {
                    SlotState::Answered(slot) => {
                        // The next answers are probably there too, each a line to be fetched from the other core.
                        if let Some(ahead) = self.in_flight.get(at + SLOTS_AHEAD) {
                            prefetch_slot(segment, shape, Position(ahead.position));
                        }
                        state.cursor += 1;
                        advanced = true;
                        self.take_answer(at, rank, &slot);
                    }
                    SlotState::Open => break,
                    SlotState::Stray(word) => {
                        self.stray(index, word);
                        break;
                    }
                }
            }
            if thorough && self.ranks[index].cursor + 1 < end {
                advanced |= self.poll_out_of_order(index);
            }
        }
        // A record that no rank owes is terminal from the start.
        if advanced || self.in_flight.front().is_some_and(|op| op.pending == 0) {
            self.advance();
        }
        self.completions.len()
    }

    fn poll_out_of_order(&mut self, index: usize) -> bool {
        let state = &mut self.ranks[index];
        let Some(segment) = &state.segment else { return false };
        let terminals = segment.load_acquire(TERMINALS_AT); // a hint only; pairs with: port::Port::answer
        if terminals == state.terminals_seen {
            return false;
        }
        state.terminals_seen = terminals;
        self.read_behind_cursor(index)
    }

    /// Reads the slots of the records behind the first one that the rank has not answered.
    pub(super) fn read_behind_cursor(&mut self, index: usize) -> bool {
        let Some(state) = self.ranks.get(index) else {
            return false;
        };
        let from = (state.cursor + 1).saturating_sub(self.first_sequence) as usize;
        let shape = self.ring.shape();
        let mut advanced = false;
        for at in from..self.in_flight.len() {
            if self.in_flight[at].pending & (1 << index) == 0 {
                continue;
            }
            let Some(segment) = &self.ranks[index].segment else {
                break;
            };
            if let SlotState::Answered(slot) = read_slot(segment, shape, Position(self.in_flight[at].position)) {
                advanced = true;
                self.take_answer(at, Rank(index as u32), &slot);
            }
        }
        advanced
    }

    fn stray(&mut self, index: usize, word: u64) {
        // Counted once per value: a stray word stays where it is until the rank overwrites it.
        if let Some(state) = self.ranks.get_mut(index)
            && state.stray != word
        {
            state.stray = word;
            self.counts.stale += 1; // X16
        }
    }

    /// Matches an answer against the record it answers (X12), and takes it.
    #[inline]
    fn take_answer(&mut self, at: usize, rank: Rank, slot: &TerminalSlot) {
        let record = Self::record(&self.ring, &self.in_flight[at]);
        let word = |i: usize| record.get(i).copied().unwrap_or(0);
        let (identity, producer_epoch) = (word(1), word(4));
        let state = &mut self.ranks[rank.index()];
        state.answers += 1;
        let epoch = state.member.epoch.0;
        // X12: the answer is to this record, whoever published it.
        let producer = if planted("x12_current_epoch") {
            self.epoch.0
        } else {
            producer_epoch
        };
        let belongs = slot.identity == identity && slot.producer_epoch == producer && slot.worker_epoch == epoch;
        let terminal = match Terminal::from_slot(slot.status) {
            Some(terminal) if belongs => terminal,
            _ => {
                self.counts.conflicting += 1; // X16: an error for this operation only
                Terminal::Failed
            }
        };
        self.answer(at, rank, terminal, Some(slot));
    }

    #[inline]
    pub(super) fn answer(&mut self, at: usize, rank: Rank, terminal: Terminal, slot: Option<&TerminalSlot>) {
        let op = &mut self.in_flight[at];
        op.pending &= !(1 << rank.0);
        if let Some(slot) = slot {
            op.bytes_moved = op.bytes_moved.saturating_add(slot.bytes_moved);
            op.device_ns = op.device_ns.max(slot.device_ns);
            if op.digests == Digests::None {
                (op.digest, op.digests) = (slot.digest, Digests::Equal);
            } else if op.digest != slot.digest {
                op.digests = Digests::Differ;
            }
        }
        if terminal > op.worst || planted("x12_last_rank_decides") {
            op.worst = terminal;
            op.worst_rank = rank.0 as u8; // Below MAX_RANKS, 64.
            op.reason = slot.map_or(0, |s| s.reason);
            op.row = slot.map_or(u32::MAX, |s| s.row);
        }
        let early = planted("x11_first_rank_completes") && !op.released;
        if op.pending == 0 || early {
            self.complete(at);
        }
    }

    /// Every rank is terminal: the leases end, unless an Abort of the operation is still in flight (X15).
    #[inline]
    pub(super) fn complete(&mut self, at: usize) {
        let op = &mut self.in_flight[at];
        if op.kind == Kind::Padding {
            op.released = true;
            return;
        }
        let plan = Plan::parse_checked_before(Self::record(&self.ring, op)).ok();
        let (operation, target) = plan.map_or((Operation::default(), u64::MAX), |plan| {
            (plan.operation(), plan.header().target)
        });
        let (kind, worst) = (op.kind, op.worst);
        self.completions.push_back(Completion {
            position: Position(op.position),
            kind,
            operation,
            terminal: worst,
            rank: Rank(u32::from(op.worst_rank)),
            reason: op.reason,
            row: op.row,
            bytes_moved: op.bytes_moved,
            device_ns: op.device_ns,
            digest: (op.digests == Digests::Equal).then_some(op.digest),
            recovered: op.recovered,
        });
        if (op.aborts == 0 || planted("x15_release_before_abort_ends")) && !op.released {
            op.released = true;
            if let Some(plan) = plan {
                self.leases.release(&plan.lease_rows());
            }
        }
        match worst {
            Terminal::Done => self.counts.done += 1,
            Terminal::Failed => self.counts.failed += 1,
            Terminal::Rejected => self.counts.rejected += 1,
            Terminal::Superseded => self.counts.superseded += 1,
            Terminal::RankLost => self.counts.rank_lost += 1,
        }
        match kind {
            Kind::Reset => self.refresh_open(),
            Kind::Abort => self.abort_ended(target),
            // A rank whose change of tables failed has left its generation before it answered (X24a).
            _ if worst >= Terminal::Rejected => self.refresh_open(),
            _ => {}
        }
    }

    /// An Abort of the operation at `target` is terminal on every rank.
    fn abort_ended(&mut self, target: u64) {
        let Ok(index) = self.in_flight.binary_search_by_key(&target, |op| op.position) else {
            return;
        };
        let Some(op) = self.in_flight.get_mut(index) else {
            return;
        };
        op.aborts = op.aborts.saturating_sub(1);
        if op.aborts == 0 && op.pending == 0 {
            self.release(index);
        }
    }

    fn release(&mut self, at: usize) {
        let op = &mut self.in_flight[at];
        if op.released {
            return;
        }
        op.released = true;
        if let Ok(plan) = Plan::parse_checked_before(Self::record(&self.ring, op)) {
            self.leases.release(&plan.lease_rows());
        }
    }

    /// Moves `reclaim` over every record at the front whose leases have ended (X11). A record that is not committed
    /// stays, answered by nobody or not: a takeover would take the records behind it for published ones.
    pub(super) fn advance(&mut self) {
        let committed = self.ring.committed();
        let ended = |op: &InFlight| op.pending == 0 && op.released && Position(op.position) < committed;
        while self.in_flight.front().is_some_and(ended) {
            self.in_flight.pop_front();
            self.first_sequence += 1;
        }
        let reclaim = self.in_flight.front().map_or(committed, |op| Position(op.position));
        self.ring.set_reclaim(reclaim);
    }
}
