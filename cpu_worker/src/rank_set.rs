//! Which ranks have spoken: a bit each, so that one rank twice is one rank.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::Rank;
use kvsluice_layout::planted::planted;

/// A set of ranks. Memory: a bit per rank up to the highest that was ever inserted, kept when cleared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSet {
    words: Vec<u64>,
    count: u32,
}

impl RankSet {
    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
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
        let new = *word & bit == 0 || planted("r60_counts_acks");
        *word |= bit;
        self.count += u32::from(new);
        new
    }

    /// Number of ranks.
    pub fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r60_each_rank_counts_once_whatever_its_number() {
        let mut set = RankSet::default();
        for ranks in [[0, 1, 63, 64, 127, 128], [200, 65, 2, 129, 191, 64]] {
            for (before, rank) in (0..).zip(ranks) {
                assert_eq!((set.insert(Rank(rank)), set.count()), (true, before + 1), "{rank}");
                assert_eq!(
                    (set.insert(Rank(rank)), set.count()),
                    (false, before + 1),
                    "{rank} again"
                );
            }
            set.clear();
            assert_eq!(set.count(), 0);
        }
        assert_eq!(set.words.len(), 4, "a bit per rank");
    }
}
