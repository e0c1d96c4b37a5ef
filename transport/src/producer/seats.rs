//! Who answers for a rank: workers join and are lost, and data records pass only while all are there (X24).

use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::Terminal;
use kvsluice_layout::region::RANK_GENERATION_AT;

use super::{Producer, PublishError, RankState};
use crate::members::{Member, write_member};
use crate::shared::{Shared, SharedMut};

impl<C: SharedMut, R: Shared> Producer<C, R> {
    /// Puts a worker at `rank`: it answers every record from the tail on, which it should read first as a Reset (X24).
    /// The entry is stored before the caller publishes that Reset, and an open batch before the entry: the word at
    /// `first` must be one that no reader takes for a commit (X10).
    pub fn join(&mut self, rank: Rank, segment: R, epoch: ProcessEpoch, pid: u32) -> Position {
        self.flush();
        let first = self.ring.tail();
        let member = Member { epoch, first };
        write_member(self.ring.memory(), &self.map, rank, member);
        self.seat(rank, segment, member, pid);
        if let Some(state) = self.ranks.get_mut(rank.index()) {
            state.counted = true;
        }
        first
    }

    /// Takes the worker off `rank` after proof of its death (X23): its slots are read once more, every record that it
    /// still owes ends as RankLost for it, and data records are refused until a worker joins.
    pub fn lose(&mut self, rank: Rank) {
        if !planted("x24_slots_unread") {
            self.poll_thorough();
            // The hint died with the rank: every slot is read, hint or not.
            self.read_behind_cursor(rank.index());
        }
        let Some(state) = self.ranks.get_mut(rank.index()) else {
            return;
        };
        state.segment = None;
        state.member = Member::MISSING;
        write_member(self.ring.memory(), &self.map, rank, Member::MISSING);
        for index in 0..self.in_flight.len() {
            if self.in_flight[index].pending & (1 << rank.0) != 0 {
                self.answer(index, rank, Terminal::RankLost, None);
            }
        }
        self.refresh_open();
        self.advance();
    }

    /// Looks again whether data records may pass: all ranks present, and all at the channel's generation.
    pub fn refresh_open(&mut self) {
        let generation = self.generation.0;
        self.closed = self.ranks.iter().zip(0..).find_map(|(state, index)| {
            let rank = Rank(index);
            let Some(segment) = &state.segment else {
                return Some(PublishError::RankMissing { rank, pid: state.pid });
            };
            let found = segment.load_acquire(RANK_GENERATION_AT); // pairs with: port::Port::set_generation
            (found != generation).then_some(PublishError::ResetNeeded {
                rank,
                found,
                expected: generation,
            })
        });
    }

    /// Why data records may not pass now.
    pub fn closed(&self) -> Option<PublishError> {
        self.closed
    }

    pub(crate) fn seat(&mut self, rank: Rank, segment: R, member: Member, pid: u32) {
        let cursor = self.first_sequence;
        if let Some(state) = self.ranks.get_mut(rank.index()) {
            *state = RankState {
                member,
                segment: Some(segment),
                pid,
                cursor,
                terminals_seen: 0,
                answers: 0,
                counted: false,
                stray: 0,
            };
        }
        self.refresh_open();
    }
}
