//! Wide numbers renamed for the core.
//!
//! A JSON integer has 63 bits; the core's ids are the u32 of the dictionary. A decision depends on the order and the
//! equality of ids alone, so an order-preserving renaming is exact. It is only used where the numbers do not fit (or would
//! make the core's bit sets needlessly large): ordinary numbers are passed as they are.

/// Below this, numbers are passed as they are.
const DIRECT_BOUND: i64 = 1 << 20;

/// Stands for every number that is not in range. No number in range gets this name.
const OUT_OF_RANGE: u32 = u32::MAX;

/// An order-preserving renaming of the numbers in [0, bound).
pub(super) enum Names {
    /// Every number is its own name.
    Direct { bound: i64 },
    /// A number's name is its place in this ascending list.
    Ranked(Vec<i64>),
}

impl Names {
    /// Names for those of `numbers` that are in [0, bound).
    pub(super) fn below(bound: i64, numbers: impl Iterator<Item = i64>) -> Self {
        if bound <= DIRECT_BOUND {
            return Self::Direct { bound };
        }
        let mut ranked: Vec<i64> = numbers.filter(|number| (0..bound).contains(number)).collect();
        ranked.sort_unstable();
        ranked.dedup();
        Self::Ranked(ranked)
    }

    /// Names for `numbers`, none of them negative.
    pub(super) fn for_all(numbers: impl Iterator<Item = i64> + Clone) -> Self {
        match numbers.clone().max() {
            None => Self::Direct { bound: 0 },
            Some(max) if max < DIRECT_BOUND => Self::Direct { bound: max + 1 },
            Some(_) => {
                let mut ranked: Vec<i64> = numbers.collect();
                ranked.sort_unstable();
                ranked.dedup();
                Self::Ranked(ranked)
            }
        }
    }

    /// How many names there are: all are below it.
    pub(super) fn bound(&self) -> u32 {
        let bound = match self {
            Self::Direct { bound } => u32::try_from(*bound),
            Self::Ranked(ranked) => u32::try_from(ranked.len()),
        };
        bound.unwrap_or(OUT_OF_RANGE)
    }

    /// The name of a number; [`OUT_OF_RANGE`] if it has none.
    pub(super) fn name(&self, number: i64) -> u32 {
        match self {
            Self::Direct { bound } if (0..*bound).contains(&number) => u32::try_from(number).unwrap_or(OUT_OF_RANGE),
            Self::Direct { .. } => OUT_OF_RANGE,
            Self::Ranked(ranked) => {
                let place = ranked.binary_search(&number).ok();
                place
                    .and_then(|place| u32::try_from(place).ok())
                    .unwrap_or(OUT_OF_RANGE)
            }
        }
    }

    /// The number with this name.
    pub(super) fn number(&self, name: u32) -> i64 {
        match self {
            Self::Direct { .. } => i64::from(name),
            Self::Ranked(ranked) => ranked.get(name as usize).copied().unwrap_or(i64::from(name)),
        }
    }
}

/// A count of 63 bits as the core's 32: a count above 2³² − 1 is more than any list here has, and stays so.
pub(super) fn saturated(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renaming_keeps_order_and_equality_and_leads_back() {
        for bound in [DIRECT_BOUND, DIRECT_BOUND + 1, i64::MAX] {
            let numbers = [bound - 1, 7, -1, 0, 7, bound];
            let names = Names::below(bound, numbers.into_iter());
            assert!(names.name(0) < names.name(7) && names.name(7) < names.name(bound - 1));
            for number in [bound - 1, 7, 0] {
                assert_eq!(names.number(names.name(number)), number);
                assert!(names.name(number) < names.bound());
            }
            for outside in [-1, bound, i64::MIN] {
                assert!(names.name(outside) >= names.bound(), "{outside}");
            }
        }
    }
}
