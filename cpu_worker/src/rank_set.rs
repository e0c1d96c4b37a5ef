//! Which ranks have spoken: a bit each, so that one rank twice is one rank.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::Rank;
use kvsluice_layout::planted::planted;

/// A set of ranks. Memory: a bit per rank up to the highest that was ever inserted, kept when cleared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSet {
    words: Vec<u64>,
    len: u32,
}

impl RankSet {
    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }

    /// Adds `rank`; true if it was not there.
    pub fn insert(&mut self, rank: Rank) -> bool {
        let index = rank.index() / 64;
        if index >= self.words.len() {
            self.words.resize(index + 1, 0);
        }
        let Some(word) = self.words.get_mut(index) else {
            return false;
        };
        let bit = 1_u64 << (rank.get() % 64);
        let new = *word & bit == 0 || planted("ledger_counts_acks");
        *word |= bit;
        self.len += u32::from(new);
        new
    }

    /// Number of ranks.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// True without any rank.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
