//! Selection, upload and retention through the whole system (issue B): the production producer, rounds, store and
//! workers in one process, on host devices that are as late, as torn and as interleaved as the contract allows.
//!
//! A test never waits for time: it steps the parts that it lets run. Seeds are in every failure message.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod observer;
mod rig;
mod through_tables;

mod every_store;
mod finishing;
mod late_ranks;
mod random_rounds;
mod readers;
mod resume;
mod sources;
mod takeover;
