//! A set of block numbers as bits: membership in one step, and its members come out ascending for nothing.
//!
//! Every decision here asks "is this id in that list" for tens of thousands of ids per round. A bit per block answers
//! from the first-level cache (65,536 blocks are 8 KiB), and because a walk over the words yields ascending ids, R30
//! needs no sort.
#![forbid(unsafe_code)]

use core::marker::PhantomData;

use kvsluice_layout::ids::{LogicalBlock, PhysicalBlock, ResidentSlot};

/// An id space that a [`BlockSet`] can hold. Spaces do not mix (R18): a set is of one of them.
pub trait BlockNumber: Copy {
    /// The bare number.
    fn number(self) -> u32;
    /// The id with this number.
    fn from_number(number: u32) -> Self;
}

macro_rules! block_number {
    ($($name:ident),+) => {
        $(impl BlockNumber for $name {
            #[inline(always)]
            fn number(self) -> u32 {
                self.get()
            }
            #[inline(always)]
            fn from_number(number: u32) -> Self {
                Self(number)
            }
        })+
    };
}

block_number!(LogicalBlock, PhysicalBlock, ResidentSlot);

/// A set of ids of one space. Memory: one bit per number below the bound given to [`BlockSet::reset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSet<Id> {
    words: Vec<u64>,
    space: PhantomData<Id>,
}

impl<Id> Default for BlockSet<Id> {
    fn default() -> Self {
        Self {
            words: Vec::new(),
            space: PhantomData,
        }
    }
}

impl<Id: BlockNumber> BlockSet<Id> {
    /// Empties the set and makes room for the numbers below `bound`. Allocates only when `bound` grows.
    pub fn reset(&mut self, bound: usize) {
        self.words.clear();
        self.words.resize(bound.div_ceil(64), 0);
    }

    /// Adds `id`; true if it was not there. An id without room is not added: callers check the range first.
    #[inline(always)]
    pub fn insert(&mut self, id: Id) -> bool {
        let number = id.number();
        let Some(word) = self.words.get_mut((number >> 6) as usize) else {
            return false;
        };
        let bit = 1_u64 << (number & 63);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// True if `id` is in the set.
    #[inline(always)]
    pub fn contains(&self, id: Id) -> bool {
        let number = id.number();
        self.words
            .get((number >> 6) as usize)
            .is_some_and(|word| word & (1_u64 << (number & 63)) != 0)
    }

    /// How many members `other` does not have.
    pub fn difference_len(&self, other: &Self) -> u32 {
        self.words
            .iter()
            .zip(&other.words)
            .map(|(&bits, &gone)| (bits & !gone).count_ones())
            .sum()
    }

    /// Appends the members, ascending, to `out`.
    pub fn append_to(&self, out: &mut Vec<Id>) {
        for (word, &bits) in (0_u32..).zip(&self.words) {
            append_bits(word, bits, out);
        }
    }

    /// Appends the members that `other` does not have, ascending, to `out`.
    pub fn append_difference(&self, other: &Self, out: &mut Vec<Id>) {
        for (word, (&bits, &gone)) in (0_u32..).zip(self.words.iter().zip(&other.words)) {
            append_bits(word, bits & !gone, out);
        }
    }

    /// Appends (`self` without `other`) together with `extra`, ascending, to `out`. The three have one bound.
    pub fn append_difference_and(&self, other: &Self, extra: &Self, out: &mut Vec<Id>) {
        let words = self.words.iter().zip(&other.words).zip(&extra.words);
        for (word, ((&bits, &gone), &more)) in (0_u32..).zip(words) {
            append_bits(word, (bits & !gone) | more, out);
        }
    }
}

#[inline(always)]
fn append_bits<Id: BlockNumber>(word: u32, mut bits: u64, out: &mut Vec<Id>) {
    while bits != 0 {
        out.push(Id::from_number(word * 64 + bits.trailing_zeros()));
        bits &= bits - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_out_ascending_and_differences_leave_out_the_other_set() {
        let mut a = BlockSet::default();
        let mut b = BlockSet::default();
        let mut c = BlockSet::default();
        for set in [&mut a, &mut b, &mut c] {
            set.reset(200);
        }
        for id in [199, 0, 63, 64, 128] {
            assert!(a.insert(LogicalBlock(id)));
            assert!(!a.insert(LogicalBlock(id)));
        }
        b.insert(LogicalBlock(64));
        c.insert(LogicalBlock(65));
        assert_eq!(
            (a.difference_len(&b), b.difference_len(&a), c.difference_len(&a)),
            (4, 0, 1)
        );
        let mut out = Vec::new();
        a.append_to(&mut out);
        assert_eq!(out, [0, 63, 64, 128, 199].map(LogicalBlock));
        out.clear();
        a.append_difference(&b, &mut out);
        assert_eq!(out, [0, 63, 128, 199].map(LogicalBlock));
        out.clear();
        a.append_difference_and(&b, &c, &mut out);
        assert_eq!(out, [0, 63, 65, 128, 199].map(LogicalBlock));
        out.clear();
        c.insert(LogicalBlock(63));
        a.append_difference_and(&b, &c, &mut out);
        assert_eq!(
            out,
            [0, 63, 65, 128, 199].map(LogicalBlock),
            "a member of both comes once"
        );
        assert!(a.contains(LogicalBlock(199)) && !a.contains(LogicalBlock(198)));
    }

    #[test]
    fn an_id_without_room_is_no_member() {
        let mut set = BlockSet::default();
        set.reset(10);
        assert!(!set.insert(PhysicalBlock(64)) && !set.contains(PhysicalBlock(u32::MAX)));
        set.insert(PhysicalBlock(9));
        set.reset(10);
        assert!(!set.contains(PhysicalBlock(9)));
    }
}
