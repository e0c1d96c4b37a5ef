//! Who decides what moves: selector, planner, ledger, retention, host store, and the producer process.
//!
//! The decision modules are pure: no clock, no I/O, no shared memory, no unsafe code, and no input makes them panic. They
//! run in production, in the property tests and behind `kvsluice eval` ([`eval`]) alike. Data takes one path through
//! them: scores → [`selector`] → [`planner`] → upload → [`ledger`] commit → [`retain`] → release.

pub mod bench_planner;
pub mod block_set;
pub mod diff_plan;
pub mod eval;
pub mod ledger;
pub mod planner;
pub mod rank_set;
pub mod retain;
pub mod selector;
pub mod whole_blocks;
