//! What a producer process is started with.

use std::path::PathBuf;

use kvsluice_layout::geometry::Geometry;
use serde::{Deserialize, Serialize};

use crate::rounds::WorkloadOptions;

/// Where the segments live (X21).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residence {
    /// Anonymous; any surviving worker can hand them to a new producer.
    #[default]
    Memfd,
    /// Anonymous, and no worker can map control or pool writable by any means. A new producer starts cold.
    Hardened,
    /// Named files in this folder on tmpfs or hugetlbfs, which survive a crash of both sides.
    Persistent(PathBuf),
}

/// What the death of a worker means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnRankLost {
    /// The producer ends with an error that names it.
    #[default]
    Fail,
    /// A new worker may take its place; requests begin again.
    Wait,
}

/// What a producer process is started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ProducerOptions {
    /// Name of the channel.
    pub channel: String,
    /// Where channels live; `None` for the default.
    #[serde(default)]
    pub runtime_dir: Option<PathBuf>,
    /// Users besides this process's own who may take part (X20).
    #[serde(default)]
    pub allowed_uids: Vec<u32>,
    /// The geometry; every worker's must be equal.
    pub geometry: Geometry,
    /// Bytes of the plan ring, a power of two.
    pub ring_bytes: usize,
    /// Slots of each rank's write-back area.
    #[serde(default)]
    pub write_back_slots: usize,
    /// Where the segments live.
    #[serde(default)]
    pub residence: Residence,
    /// The NUMA node that all memory must come from.
    #[serde(default)]
    pub numa_node: Option<u32>,
    /// How long to wait for the workers of all ranks at start.
    pub attach_patience_ms: u64,
    /// How long to wait for workers that may have outlived an earlier producer.
    pub takeover_patience_ms: u64,
    /// How long to wait for what is in flight after a stop.
    pub drain_patience_ms: u64,
    /// Kill a rank that holds the oldest record for so long; `None`: never.
    #[serde(default)]
    pub expel_after_ms: Option<u64>,
    /// What the death of a worker means.
    #[serde(default)]
    pub on_rank_lost: OnRankLost,
    /// The trace; `None` for the built-in sample.
    #[serde(default)]
    pub trace: Option<PathBuf>,
    /// How it is played.
    #[serde(default)]
    pub workload: WorkloadOptions,
    /// Where to write one line per round.
    #[serde(default)]
    pub rounds_log: Option<PathBuf>,
}

impl ProducerOptions {
    /// The defaults for a channel and a geometry.
    pub fn new(channel: impl Into<String>, geometry: Geometry) -> Self {
        Self {
            channel: channel.into(),
            runtime_dir: None,
            allowed_uids: Vec::new(),
            geometry,
            ring_bytes: 4 << 20,
            write_back_slots: 0,
            residence: Residence::Memfd,
            numa_node: None,
            attach_patience_ms: 30_000,
            takeover_patience_ms: 200,
            drain_patience_ms: 10_000,
            expel_after_ms: None,
            on_rank_lost: OnRankLost::Fail,
            trace: None,
            workload: WorkloadOptions::default(),
            rounds_log: None,
        }
    }
}
