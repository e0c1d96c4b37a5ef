//! What a workload did and what it cost: in all, and round by round.
#![forbid(unsafe_code)]

use hdrhistogram::{CreationError, Histogram};
use serde::{Deserialize, Serialize};

use crate::cost::{MovementCounters, RetainTerms};
use crate::retain::RetainKind;

/// The six movement counters (R1, R2), the terms of Tretain (R63) and the blocks released (R66).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Gathered by the CPU for copied sources.
    pub cpu_gather_bytes: u64,
    /// Gather frames taken by the CPU.
    pub cpu_destination_bytes: u64,
    /// Copied from host to device, over all ranks, as the workers report it.
    pub h2d_bytes: u64,
    /// Moved for uploads beyond what their plans name: unpacked or scattered by a second pass.
    pub gpu_scatter_bytes: u64,
    /// Moved on the devices by retention, as the workers report it.
    pub gpu_compaction_bytes: u64,
    /// Bytes of the records that said so.
    pub metadata_bytes: u64,
    /// Physical blocks that retention freed; not the same as bytes moved (R56, R66).
    pub blocks_released: u64,
    /// Terms of Tretain, summed in µs.
    pub retain_us: RetainCosts,
}

/// The terms of Tretain in µs (R63). A term that was never measured is absent, not zero (R65).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RetainCosts {
    /// Device time of remaps, where the worker reports it.
    pub table_update: Option<f64>,
    /// Making plans.
    pub plan: Option<f64>,
    /// Encoding, publishing and acknowledging them.
    pub metadata: Option<f64>,
    /// From publication to the last rank's terminal, without the device's own time.
    pub wait: Option<f64>,
    /// The owner's work.
    pub allocator: Option<f64>,
    /// Device time of byte moves, where the worker reports it. Absent where all retention was by remap.
    pub kv_move: Option<f64>,
}

impl RetainCosts {
    fn add(&mut self, other: &Self) {
        let add = |to: &mut Option<f64>, more: Option<f64>| {
            if let Some(more) = more {
                *to = Some(to.unwrap_or(0.0) + more);
            }
        };
        add(&mut self.table_update, other.table_update);
        add(&mut self.plan, other.plan);
        add(&mut self.metadata, other.metadata);
        add(&mut self.wait, other.wait);
        add(&mut self.allocator, other.allocator);
        add(&mut self.kv_move, other.kv_move);
    }

    /// The same as the cost model takes them.
    pub fn terms(&self) -> RetainTerms {
        RetainTerms {
            table_update_us: self.table_update,
            plan_us: self.plan,
            metadata_us: self.metadata,
            wait_us: self.wait,
            allocator_us: self.allocator,
            kv_move_us: self.kv_move,
        }
    }
}

impl Costs {
    /// Adds the costs of one more round.
    pub fn add(&mut self, other: &Self) {
        let mut movement = self.movement();
        movement.add(&other.movement());
        let mut retain_us = self.retain_us;
        retain_us.add(&other.retain_us);
        *self = Self {
            cpu_gather_bytes: movement.cpu_gather_bytes,
            cpu_destination_bytes: movement.cpu_destination_bytes,
            h2d_bytes: movement.h2d_bytes,
            gpu_scatter_bytes: movement.gpu_scatter_bytes,
            gpu_compaction_bytes: movement.gpu_compaction_bytes,
            metadata_bytes: movement.metadata_bytes,
            blocks_released: self.blocks_released + other.blocks_released,
            retain_us,
        };
    }

    /// The six movement counters alone.
    pub fn movement(&self) -> MovementCounters {
        MovementCounters {
            cpu_gather_bytes: self.cpu_gather_bytes,
            cpu_destination_bytes: self.cpu_destination_bytes,
            h2d_bytes: self.h2d_bytes,
            gpu_scatter_bytes: self.gpu_scatter_bytes,
            gpu_compaction_bytes: self.gpu_compaction_bytes,
            metadata_bytes: self.metadata_bytes,
        }
    }
}

/// What the upload of a round was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UploadKind {
    /// Nothing was missing: a Keep record.
    #[default]
    Zero,
    /// What was wanted and not held.
    Delta,
    /// Everything wanted, because a layer's candidates ran out (R32).
    Full,
}

/// How a round's blocks were retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RetainedBy {
    /// One table per group.
    SharedTable,
    /// One table per layer.
    LayerTables,
    /// Bytes moved on the device.
    ByteMove,
}

impl From<RetainKind> for RetainedBy {
    fn from(kind: RetainKind) -> Self {
        match kind {
            RetainKind::SharedTableRemap => Self::SharedTable,
            RetainKind::LayerTableRemap => Self::LayerTables,
            RetainKind::ExistingByteMovePlan => Self::ByteMove,
        }
    }
}

/// One round of one request: a line of the rounds log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundRecord {
    /// Number of the request in the trace, from 0.
    pub request: u64,
    /// Its epoch.
    pub epoch: u64,
    /// The round, from 0.
    pub round: u32,
    /// Uploads that were tried.
    pub attempts: u32,
    /// Whole blocks of the sequence.
    pub sequence_blocks: u32,
    /// What the upload was.
    pub upload: UploadKind,
    /// Blocks uploaded, over all layers.
    pub uploaded: u64,
    /// Pads among them (R31).
    pub pads: u64,
    /// Wanted blocks that a delta would have cut (R32).
    pub truncated: u64,
    /// How the tables changed; absent where nothing changed.
    pub retained_by: Option<RetainedBy>,
    /// Map revision g afterwards.
    pub map_revision: u64,
    /// Selection revision r afterwards.
    pub selection_revision: u64,
    /// What it cost.
    pub costs: Costs,
}

/// What a workload did so far.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Requests that came to their end.
    pub requests: u64,
    /// Requests that were given up because the device failed them; they are among `requests`.
    pub requests_failed: u64,
    /// Times that a request gave its blocks back and began again.
    pub preempted: u64,
    /// Requests that were begun again because the pools were reset.
    pub restarted: u64,
    /// Submissions that were retries and found their operation (R47).
    pub retries_reused: u64,
    /// Data records published.
    pub plans: u64,
    /// Rows of them.
    pub rows: u64,
    /// Pairs of ids of them.
    pub ids: u64,
    /// Resets of the device pools.
    pub resets: u64,
    /// Rounds that came to their end.
    pub rounds: u64,
    /// What they cost.
    pub costs: Costs,
    /// From publication to the last rank's terminal, in ns, over data records.
    pub publish_to_done_ns: Histogram<u64>,
}

impl Tally {
    pub(super) fn new() -> Result<Self, CreationError> {
        Ok(Self {
            requests: 0,
            requests_failed: 0,
            preempted: 0,
            restarted: 0,
            retries_reused: 0,
            plans: 0,
            rows: 0,
            ids: 0,
            resets: 0,
            rounds: 0,
            costs: Costs::default(),
            // Up to an hour; three digits tell 1.00 µs from 1.01 µs. With fixed bounds nothing grows after start.
            publish_to_done_ns: Histogram::new_with_bounds(1, 3_600_000_000_000, 3)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_r65_costs_add_each_to_its_own_and_an_unmeasured_term_stays_absent() {
        let mut total = Costs::default();
        let retain_us = RetainCosts {
            plan: Some(1.5),
            ..RetainCosts::default()
        };
        total.add(&Costs {
            h2d_bytes: 3,
            blocks_released: 2,
            retain_us,
            ..Costs::default()
        });
        total.add(&Costs {
            gpu_compaction_bytes: 5,
            retain_us,
            ..Costs::default()
        });
        let retain_us = RetainCosts {
            plan: Some(3.0),
            ..RetainCosts::default()
        };
        let expected = Costs {
            h2d_bytes: 3,
            gpu_compaction_bytes: 5,
            blocks_released: 2,
            retain_us,
            ..Costs::default()
        };
        assert_eq!(total, expected);
        assert_eq!(total.retain_us.terms().kv_move_us, None);
    }
}
