//! Who moves the blocks: device trait, host device, copy planner, tables, and the worker process.
//!
//! A plan becomes bytes along one path: [`copy`] turns block ids into [`device::Fragment`]s, a [`device::Device`] moves
//! them behind an event, [`readers`] keeps compute and copies apart, and [`tables`] holds what attention iterates over.

pub mod copy;
pub mod device;
pub mod moves;
pub mod process;
pub mod readers;
pub mod tables;
pub mod worker;
