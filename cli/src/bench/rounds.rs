//! Medians over alternating rounds.
//!
//! A shared machine disturbs some rounds: another process takes the core, or the host takes the whole machine. Baseline
//! and product therefore alternate in rounds of about a millisecond, a round during which the kernel took a core away
//! from either process does not count, and the figure is the median of the ratios of neighbouring rounds.

use serde_json::Value;

use super::report::Figure;

/// One baseline round and the product round after it.
#[derive(Clone, Copy)]
pub(super) struct Round {
    /// Nanoseconds per unit of the baseline.
    pub(super) bare_ns: f64,
    /// Nanoseconds per unit of the product.
    pub(super) product_ns: f64,
    /// Neither process lost its core.
    pub(super) undisturbed: bool,
}

/// What the rounds of one run come to.
pub(super) struct Rounds {
    counted: Vec<Round>,
    all: usize,
    undisturbed: usize,
}

impl Rounds {
    /// Takes the undisturbed rounds, or all of them where too few are left to tell (less than a tenth).
    pub(super) fn new(rounds: &[Round]) -> Self {
        let quiet: Vec<Round> = rounds.iter().copied().filter(|r| r.undisturbed).collect();
        let undisturbed = quiet.len();
        let enough = undisturbed > 0 && undisturbed * 10 >= rounds.len();
        Self {
            counted: if enough { quiet } else { rounds.to_vec() },
            all: rounds.len(),
            undisturbed,
        }
    }

    /// Median nanoseconds per unit of the baseline.
    pub(super) fn bare_ns(&self) -> f64 {
        quantile(self.counted.iter().map(|r| r.bare_ns), 0.5)
    }

    /// Median nanoseconds per unit of the product.
    pub(super) fn product_ns(&self) -> f64 {
        quantile(self.counted.iter().map(|r| r.product_ns), 0.5)
    }

    /// A quantile of how many times longer the product took than its neighbouring baseline.
    pub(super) fn slowdown(&self, q: f64) -> f64 {
        quantile(self.counted.iter().map(|r| r.product_ns / r.bare_ns), q)
    }

    /// Adds how many rounds counted to a figure.
    pub(super) fn describe(&self, figure: Figure) -> Figure {
        figure
            .with("rounds", Value::from(self.all))
            .with("rounds undisturbed", Value::from(self.undisturbed))
    }
}

/// The value below which a share `q` of the values lies; NaN of none.
pub(super) fn quantile(values: impl Iterator<Item = f64>, q: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * q).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(bare_ns: f64, product_ns: f64, undisturbed: bool) -> Round {
        Round {
            bare_ns,
            product_ns,
            undisturbed,
        }
    }

    #[test]
    fn a_disturbed_round_does_not_count_while_enough_are_left() {
        let rounds = [
            round(10.0, 12.0, true),
            round(10.0, 90.0, false),
            round(20.0, 26.0, true),
        ];
        let rounds = Rounds::new(&rounds);
        assert_eq!((rounds.all, rounds.undisturbed), (3, 2));
        assert_eq!((rounds.slowdown(0.0), rounds.slowdown(1.0)), (1.2, 1.3));
        assert_eq!(Rounds::new(&[round(1.0, 4.0, false)]).slowdown(0.5), 4.0);
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        assert_eq!(quantile([3.0, 1.0, 2.0].into_iter(), 0.5), 2.0);
        assert_eq!(quantile((0..1000).map(f64::from), 0.99), 989.0);
        assert!(quantile(std::iter::empty(), 0.5).is_nan());
    }
}
