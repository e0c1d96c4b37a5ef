//! Comparing two ways to the same selection (R10–R14, R67–R70).
//!
//! Copies are compared byte for byte ([`bytes`]) and get no tolerance. Arithmetic on them is compared as logits of the
//! same forced prefix ([`logits`]) and has a tolerance that is declared beforehand. Both refuse to compare what is not
//! comparable: other selections, other shapes, no tolerance. A token selector and a block selector choose differently by
//! design; that is evaluation of a policy, never a failure here (R10, R70).

pub mod attention;
pub mod bytes;
pub mod logits;
