//! Who decides what moves: selector, planner, ledger, retention, host store, and the producer process.
//!
//! The decision modules are pure: no clock, no I/O, no shared memory, no unsafe code, and no input makes them panic. They
//! run in production, in the property tests and behind `kvsluice eval` ([`eval`]) alike. Data takes one path through
//! them: scores → [`selector`] → [`planner`] → upload → [`ledger`] commit → [`retain`] → release.
//!
//! Around them: [`store`] keeps the blocks of a [`trace`] in the pool, [`rounds`] plays its requests through the decision
//! modules and the plan ring, on any memory, and [`process`] does that in a process of its own.

pub mod adoption;
pub mod bench_planner;
pub mod block_set;
pub mod compare;
pub mod cost;
pub mod diff_plan;
pub mod eval;
#[cfg(test)]
mod fake_rank;
pub mod invariants;
pub mod ledger;
pub mod owner;
pub mod planner;
pub mod process;
pub mod rank_set;
pub mod residency;
pub mod retain;
pub mod retain_steps;
pub mod rounds;
pub mod selection;
pub mod selector;
pub mod store;
pub mod table;
pub mod trace;
pub mod whole_blocks;
