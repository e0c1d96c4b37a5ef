//! Peers that do whatever they can (X33): each is a process of its own that attaches for real, or never gets that far.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[cfg(test)]
mod peers;
#[cfg(test)]
mod producer;
#[cfg(test)]
mod second;
#[cfg(test)]
mod worker;
