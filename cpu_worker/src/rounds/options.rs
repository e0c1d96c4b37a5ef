//! What a workload is: how requests are played, and how hostile the play is.

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{BlockCount, GroupId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::layers::need;

/// Highest rate of anything that makes an operation start again: a higher one would hardly ever come to an end.
const RATE_MAX: f64 = 0.9;

/// Which layers of a group rank their blocks alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agreement {
    /// Every layer has scores of its own.
    PerLayer,
    /// The layers of a group share scores, so that their tables stay equal.
    PerGroup,
    /// Each request is one of the two, by the seed.
    #[default]
    Mixed,
}

/// How attention finds the blocks; see [`crate::planner::TableMode`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tables {
    /// One table per group: every layer gets as many new blocks as the one that needs most.
    #[default]
    Common,
    /// One table per layer: every layer gets its own delta.
    PerLayer,
}

/// How kept blocks stay resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keeping {
    /// By remap: a shared table where that is exact, else a table per layer (R51, R53).
    #[default]
    Auto,
    /// As on a device without tables per layer: bytes move wherever a shared table is not exact.
    ByteMove,
}

/// How an upload names its sources (X6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sources {
    /// Pool blocks, in place.
    #[default]
    SourceOnly,
    /// Blocks gathered into the gather region first.
    Copy,
}

/// How the requests of a trace are played. Rates are per upload, 0 to 0.9.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkloadOptions {
    /// Seed of scores and of everything that happens at a rate.
    pub seed: u64,
    /// Most requests to play; `None` for the whole trace.
    pub requests: Option<u64>,
    /// Most requests at a time.
    pub concurrency: u32,
    /// Selections of one request.
    pub rounds: u32,
    /// Blocks that a full-attention layer wants, as far as the device pool holds them.
    pub budget: BlockCount,
    /// First blocks that are always wanted.
    pub sink: BlockCount,
    /// Last whole blocks that are always wanted.
    pub recent: BlockCount,
    /// How far scores move from one selection to the next: 0 not at all, 1 as far as blocks differ.
    pub drift: f64,
    /// Which layers rank alike.
    pub agreement: Agreement,
    /// How attention finds the blocks.
    pub tables: Tables,
    /// How kept blocks stay.
    pub keeping: Keeping,
    /// How uploads name their sources.
    pub sources: Sources,
    /// Uploads that are aborted right behind their publication, and tried again (X15, R59).
    pub abort_rate: f64,
    /// Uploads during which their request finishes (F11).
    pub finish_rate: f64,
    /// Uploads that are submitted twice (R47).
    pub retry_rate: f64,
    /// Times that an upload which failed on the device is tried before its request is given up.
    pub attempts: u32,
    /// Say what the blocks hold, so that workers can compare: 8 bytes per id.
    pub tags: bool,
}

impl Default for WorkloadOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            requests: None,
            concurrency: 16,
            rounds: 4,
            budget: BlockCount(16),
            sink: BlockCount(1),
            recent: BlockCount(2),
            drift: 0.5,
            agreement: Agreement::Mixed,
            tables: Tables::Common,
            keeping: Keeping::Auto,
            sources: Sources::SourceOnly,
            abort_rate: 0.0,
            finish_rate: 0.0,
            retry_rate: 0.0,
            attempts: 3,
            tags: true,
        }
    }
}

/// Options that no workload can have. The user causes it.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum OptionsError {
    /// A number out of its range.
    #[error("workload option {name}: found {found}, expected {expected}")]
    Range {
        /// The option.
        name: &'static str,
        /// Its value.
        found: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// A device pool that cannot hold what one layer always wants.
    #[error(
        "group {group}: one request needs {needed} device blocks, there are {found}: raise --device-blocks, or lower \
         sink and recent"
    )]
    DeviceBlocks {
        /// The group.
        group: GroupId,
        /// Blocks that a request needs at least.
        needed: u32,
        /// Blocks of the pool, without the null block.
        found: u32,
    },
    /// Copied sources and too little room to gather them (R21, R22).
    #[error(
        "group {group}: sources are to be copied and the gather region has {found} blocks, {needed} are needed: raise \
         --gather-blocks, or use source-only"
    )]
    GatherBlocks {
        /// The group.
        group: GroupId,
        /// Blocks that a record needs at least.
        needed: u32,
        /// Blocks of the region.
        found: u32,
    },
}

impl WorkloadOptions {
    /// Whether a producer of this geometry can play the workload, so that it is said before one is started.
    ///
    /// # Errors
    /// [`OptionsError`]: a number out of its range, or a group's pools too small for one request.
    pub fn check(&self, geometry: &Geometry) -> Result<(), OptionsError> {
        let range = |name, found: f64, fits: bool, expected| {
            if fits {
                Ok(())
            } else {
                Err(OptionsError::Range { name, found, expected })
            }
        };
        range(
            "concurrency",
            self.concurrency.into(),
            self.concurrency > 0,
            "at least 1",
        )?;
        range("rounds", self.rounds.into(), self.rounds > 0, "at least 1")?;
        range("attempts", self.attempts.into(), self.attempts > 0, "at least 1")?;
        range("drift", self.drift, (0.0..=1.0).contains(&self.drift), "0 to 1")?;
        for (name, rate) in [
            ("abort-rate", self.abort_rate),
            ("finish-rate", self.finish_rate),
            ("retry-rate", self.retry_rate),
        ] {
            range(name, rate, (0.0..=RATE_MAX).contains(&rate), "0 to 0.9")?;
        }
        for (number, spec) in (0..).zip(&geometry.groups) {
            need(spec, GroupId(number), self)?;
        }
        Ok(())
    }
}
