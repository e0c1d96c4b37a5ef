//! Comparison of logits under a forced prefix (R12–R14, R69).
//!
//! Two models can agree on the best token and disagree on everything else, so positions are compared by their whole
//! distribution: the largest logit and logprob errors, and half the sum of probability differences (total variation).
#![forbid(unsafe_code)]

use kvsluice_layout::ids::TokenPosition;
use kvsluice_layout::planted::planted;
use thiserror::Error;

/// How numbers are stored and rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// Brain floats: the upper half of an f32.
    Bf16,
}

/// The errors that a dtype may show, fixed before anything is measured (R13).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Largest difference of a logit.
    pub logit: f64,
    /// Largest difference of a log-probability.
    pub logprob: f64,
    /// Largest total variation of a position's distribution, 0 to 1.
    pub mass: f64,
}

/// Declared tolerances.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tolerances(Vec<(Dtype, Tolerance)>);

impl Tolerances {
    /// Tolerances per dtype. Of a repeated dtype the first counts.
    pub fn declare(tolerances: impl IntoIterator<Item = (Dtype, Tolerance)>) -> Self {
        Self(tolerances.into_iter().collect())
    }

    fn of(&self, dtype: Dtype) -> Option<Tolerance> {
        self.0
            .iter()
            .find(|(declared, _)| *declared == dtype || planted("r13_tolerance_of_another_dtype"))
            .map(|(_, tolerance)| *tolerance)
    }
}

/// What one way computed under a forced prefix.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Dtype of the arithmetic.
    pub dtype: Dtype,
    /// The tokens that were forced; the prefix of position j is the first j of them.
    pub tokens: Vec<u32>,
    /// Logits by position, ascending.
    pub logits: Vec<(TokenPosition, Vec<f32>)>,
}

impl Trace {
    fn prefix(&self, position: TokenPosition) -> Option<&[u32]> {
        self.tokens.get(..position.index())
    }
}

/// Why nothing was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LogitsRefused {
    /// No tolerance was declared for the dtype (R13).
    #[error("no tolerance is declared for {0:?}: declare one before comparing")]
    NoTolerance(Dtype),
    /// The two sides computed in different dtypes.
    #[error("{0:?} on one side, {1:?} on the other")]
    OtherDtype(Dtype, Dtype),
    /// The sides have vocabularies of different sizes, or an empty one.
    #[error("{position:?}: {expected} and {found} logits")]
    Vocabulary {
        /// The position.
        position: TokenPosition,
        /// Logits on one side.
        expected: usize,
        /// Logits on the other.
        found: usize,
    },
}

/// One compared position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionReport {
    /// The position.
    pub position: TokenPosition,
    /// Largest difference of a logit.
    pub logit_error: f64,
    /// Largest difference of a log-probability.
    pub logprob_error: f64,
    /// Total variation of the distributions.
    pub mass_error: f64,
    /// Both sides have the same best token. Says nothing about the rest (R12).
    pub same_top1: bool,
    /// An error is above its tolerance, or no number.
    pub violates: bool,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitsReport {
    /// Positions with the same prefix on both sides.
    pub compared: Vec<PositionReport>,
    /// Positions that were excluded because the prefixes differ (R14).
    pub diverged: Vec<TokenPosition>,
    /// Positions that only one side has (R13).
    pub not_covered: Vec<TokenPosition>,
}

impl LogitsReport {
    /// Share of compared positions that violate a tolerance (R69); `None` if none was compared.
    pub fn violation_rate(&self) -> Option<f64> {
        let mut violations = self.compared.iter().filter(|report| report.violates).count();
        if violations > 0 && planted("r69_the_rate_is_a_verdict") {
            violations = self.compared.len();
        }
        (!self.compared.is_empty()).then(|| violations as f64 / self.compared.len() as f64)
    }

    /// True if something was compared and nothing violates a tolerance.
    pub fn passes(&self) -> bool {
        self.violation_rate() == Some(0.0)
    }
}

/// Compares two traces position by position.
pub fn compare_logits(expected: &Trace, found: &Trace, tolerances: &Tolerances) -> Result<LogitsReport, LogitsRefused> {
    if expected.dtype != found.dtype {
        return Err(LogitsRefused::OtherDtype(expected.dtype, found.dtype));
    }
    let tolerance = tolerances
        .of(expected.dtype)
        .ok_or(LogitsRefused::NoTolerance(expected.dtype))?;
    let mut report = LogitsReport::default();
    for (position, expected_logits) in &expected.logits {
        let other = found.logits.iter().find(|(other, _)| other == position);
        let Some((_, found_logits)) = other else {
            report.not_covered.push(*position);
            continue;
        };
        let (a, b) = (expected.prefix(*position), found.prefix(*position));
        if (a.is_none() || a != b) && !planted("r14_diverged_prefixes") {
            report.diverged.push(*position); // R14
            continue;
        }
        let (expected, found) = (expected_logits.len(), found_logits.len());
        if expected != found || expected == 0 {
            return Err(LogitsRefused::Vocabulary {
                position: *position,
                expected,
                found,
            });
        }
        report
            .compared
            .push(compare_position(*position, expected_logits, found_logits, tolerance));
    }
    let only_found = found.logits.iter().map(|(position, _)| *position);
    let lacks = |position: &TokenPosition| expected.logits.iter().all(|(other, _)| other != position);
    let unlisted = planted("r13_one_side_covers"); // R13: what either side lacks
    report
        .not_covered
        .extend(only_found.filter(|position| lacks(position) && !unlisted));
    report.not_covered.sort_unstable();
    Ok(report)
}

fn compare_position(position: TokenPosition, a: &[f32], b: &[f32], tolerance: Tolerance) -> PositionReport {
    let (log_a, log_b) = (log_softmax(a), log_softmax(b));
    let logit_error = largest(a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()));
    let logprob_error = largest(log_a.iter().zip(&log_b).map(|(a, b)| (a - b).abs()));
    let mass_error = log_a
        .iter()
        .zip(&log_b)
        .map(|(a, b)| (a.exp() - b.exp()).abs())
        .sum::<f64>()
        / 2.0;
    let same_top1 = top1(a) == top1(b);
    let errors = [
        (logit_error, tolerance.logit),
        (logprob_error, tolerance.logprob),
        (mass_error, tolerance.mass),
    ];
    // An error that is no number is not within a tolerance.
    let within = errors
        .iter()
        .all(|(error, limit)| error <= limit || (error.is_nan() && planted("r69_a_nan_is_within")));
    let violates = if planted("r12_top1_only") { !same_top1 } else { !within };
    PositionReport {
        position,
        logit_error,
        logprob_error,
        mass_error,
        same_top1,
        violates,
    }
}

/// The largest of some errors; NaN if one of them is.
fn largest(errors: impl Iterator<Item = f64>) -> f64 {
    errors.fold(
        0.0,
        |max, error| if error > max || error.is_nan() { error } else { max },
    )
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits
        .iter()
        .fold(f64::NEG_INFINITY, |max, logit| max.max(f64::from(*logit)));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - max - sum.ln()).collect()
}

fn top1(logits: &[f32]) -> Option<usize> {
    logits
        .iter()
        .enumerate()
        .max_by(|(i, a), (j, b)| a.total_cmp(b).then(j.cmp(i)))
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    fn trace(tokens: &[u32], logits: &[(u32, &[f32])]) -> Trace {
        let logits = logits
            .iter()
            .map(|(position, logits)| (TokenPosition(*position), logits.to_vec()))
            .collect();
        Trace {
            dtype: Dtype::F32,
            tokens: tokens.to_vec(),
            logits,
        }
    }

    fn tight() -> Tolerances {
        Tolerances::declare([(
            Dtype::F32,
            Tolerance {
                logit: 1e-5,
                logprob: 1e-5,
                mass: 1e-5,
            },
        )])
    }

    #[test]
    fn r13_without_a_declared_tolerance_nothing_is_compared() {
        let a = trace(&[], &[(0, &[1.0, 2.0])]);
        let bf16 = Trace {
            dtype: Dtype::Bf16,
            ..a.clone()
        };
        assert_eq!(
            compare_logits(&a, &a, &Tolerances::default()),
            Err(LogitsRefused::NoTolerance(Dtype::F32))
        );
        assert_eq!(
            compare_logits(&bf16, &bf16, &tight()),
            Err(LogitsRefused::NoTolerance(Dtype::Bf16))
        );
        assert_eq!(
            compare_logits(&a, &bf16, &tight()),
            Err(LogitsRefused::OtherDtype(Dtype::F32, Dtype::Bf16))
        );
        assert!(
            with_planted("r13_tolerance_of_another_dtype", || compare_logits(
                &bf16,
                &bf16,
                &tight()
            ))
            .is_ok(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r12_equal_top1_and_different_logits_are_different() {
        let (a, b) = (
            trace(&[], &[(0, &[3.0, 1.0, 0.0])]),
            trace(&[], &[(0, &[3.0, 2.0, 0.0])]),
        );
        let verdict = || compare_logits(&a, &b, &tight()).unwrap();
        let report = verdict();
        assert!(report.compared[0].same_top1 && report.compared[0].violates && !report.passes());
        assert!((report.compared[0].mass_error - 0.145_3).abs() < 1e-3, "{report:?}");
        assert!(
            with_planted("r12_top1_only", verdict).passes(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r14_positions_after_a_divergence_are_excluded_and_recorded() {
        let a = trace(&[7, 8, 9], &[(0, &[1.0]), (1, &[1.0]), (2, &[1.0]), (3, &[1.0])]);
        let b = trace(&[7, 5, 9], &[(0, &[1.0]), (1, &[1.0]), (2, &[4.0]), (3, &[4.0])]);
        let report = compare_logits(&a, &b, &tight()).unwrap();
        assert_eq!(
            report
                .compared
                .iter()
                .map(|report| report.position.get())
                .collect::<Vec<_>>(),
            [0, 1]
        );
        assert_eq!(
            (report.diverged.clone(), report.passes()),
            (vec![TokenPosition(2), TokenPosition(3)], true)
        );
        let compared = with_planted("r14_diverged_prefixes", || compare_logits(&a, &b, &tight())).unwrap();
        assert!(!compared.passes(), "the planted fault is not seen");
    }

    #[test]
    fn r13_positions_that_one_side_lacks_are_listed() {
        let a = trace(&[7, 8], &[(0, &[1.0]), (2, &[1.0])]);
        let b = trace(&[7, 8], &[(1, &[1.0]), (2, &[1.0])]);
        let not_covered = || compare_logits(&a, &b, &tight()).unwrap().not_covered;
        assert_eq!(not_covered(), [TokenPosition(0), TokenPosition(1)]);
        assert_ne!(
            with_planted("r13_one_side_covers", not_covered),
            not_covered(),
            "the planted fault is not seen"
        );
        let nothing = compare_logits(&a, &trace(&[], &[]), &tight()).unwrap();
        assert!(
            nothing.violation_rate().is_none() && !nothing.passes(),
            "nothing compared is no pass"
        );
    }

    #[test]
    fn r69_the_violation_rate_is_recorded_and_a_nan_is_a_violation() {
        let a = trace(
            &[1, 2, 3],
            &[(0, &[1.0, 0.0]), (1, &[1.0, 0.0]), (2, &[1.0, 0.0]), (3, &[1.0, 0.0])],
        );
        let b = trace(
            &[1, 2, 3],
            &[
                (0, &[1.0, 0.0]),
                (1, &[1.0, f32::NAN]),
                (2, &[1.0, 0.0]),
                (3, &[1.0, 0.0]),
            ],
        );
        let rate = || compare_logits(&a, &b, &tight()).unwrap().violation_rate();
        assert_eq!(rate(), Some(0.25));
        for fault in ["r69_a_nan_is_within", "r69_the_rate_is_a_verdict"] {
            assert_ne!(
                with_planted(fault, rate),
                rate(),
                "the planted fault {fault} is not seen"
            );
        }
        assert_eq!(compare_logits(&a, &a, &tight()).unwrap().violation_rate(), Some(0.0));
    }
}
