//! What a producer process tells: to the terminal, or as JSON lines to the process that started it.

use kvsluice_transport::producer::Counts;
use kvsluice_transport::shared::{Shared, SharedMut};
use serde::{Deserialize, Serialize};

use crate::rounds::{Costs, Rounds};
use crate::trace::{TraceError, TraceRequest};

/// What a worker that outlived its producer is told where its channel cannot be taken over: what was in flight is lost.
pub const STARTS_COLD: &str = "the channel cannot be taken over and starts cold";

/// What a producer process tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The door is open: workers can attach.
    Ready {
        /// This process.
        pid: u32,
        /// The channel.
        channel: String,
        /// How often the channel was taken over.
        incarnation: u64,
    },
    /// A worker takes part.
    Attached {
        /// Its rank.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// A worker does not fit.
    Refused {
        /// The rank that it wanted.
        rank: u32,
        /// Its process.
        pid: u32,
        /// What does not fit.
        reason: String,
    },
    /// The channel of a dead producer was taken over (X25).
    Recovered {
        /// The new incarnation.
        incarnation: u64,
        /// Ranks whose workers survived.
        ranks: Vec<u32>,
        /// Records that were in flight.
        in_flight: u64,
        /// Blocks that the directory vouches for.
        warm_blocks: u64,
        /// Position behind the last record of the journal.
        tail: u64,
        /// All ranks hold alike, and the pools are not reset (X25).
        adopted: bool,
        /// Requests that go on with the blocks that they hold.
        resumed_requests: u64,
        /// Requests that give their blocks back and begin again: what lies in them is not known.
        begun_again_requests: u64,
    },
    /// Data flows again: the first transfer since the last worker attached or was adopted is Done on every rank.
    Resumed {
        /// Microseconds since that worker attached or was adopted.
        after_us: u64,
    },
    /// From time to time.
    Progress {
        /// Requests that ended.
        requests: u64,
        /// Requests in all, where that is known.
        of: Option<u64>,
        /// Data records published.
        plans: u64,
        /// Bytes copied to the devices in rounds that ended.
        bytes_h2d: u64,
    },
    /// A worker is proven dead.
    RankLost {
        /// Its rank.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// The last event.
    Summary(Box<Summary>),
}

/// How operations ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completions {
    /// Operations published or taken over: as many as have ended, once nothing is in flight.
    pub published: u64,
    /// On every rank Done.
    pub done: u64,
    /// Failed on a device.
    pub failed: u64,
    /// Refused by a rank.
    pub rejected: u64,
    /// Ended by an Abort.
    pub superseded: u64,
    /// A rank was lost meanwhile.
    pub rank_lost: u64,
    /// Answers that repeat one already taken (X16).
    pub duplicate: u64,
    /// Words that answer nothing (X16).
    pub stale: u64,
    /// Answers that do not belong to what they answer (X16).
    pub conflicting: u64,
}

impl Completions {
    /// Operations that ended in any way.
    pub fn ended(&self) -> u64 {
        self.done + self.failed + self.rejected + self.superseded + self.rank_lost
    }
}

impl From<Counts> for Completions {
    fn from(counts: Counts) -> Self {
        Self {
            published: counts.published,
            done: counts.done,
            failed: counts.failed,
            rejected: counts.rejected,
            superseded: counts.superseded,
            rank_lost: counts.rank_lost,
            duplicate: counts.duplicate,
            stale: counts.stale,
            conflicting: counts.conflicting,
        }
    }
}

/// Percentiles in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// One in a hundred is slower.
    pub p99: f64,
    /// One in a thousand is slower.
    pub p999: f64,
}

/// Latencies in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// From the publication of a data record to the last rank's Done, as the producer sees it.
    pub publish_to_done: Percentiles,
}

/// What was played.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// The file, or the built-in sample.
    pub file: String,
    /// Requests of it that ended.
    pub requests: u64,
}

/// What a producer did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests that ended.
    pub requests: u64,
    /// Requests among them that the device failed.
    pub requests_failed: u64,
    /// Rounds that ended.
    pub rounds: u64,
    /// Times that a request gave its blocks back to let another go on.
    pub preempted: u64,
    /// Times that a request began again after a reset.
    pub restarted: u64,
    /// Resets of the device pools.
    pub resets: u64,
    /// Retried submissions that found their operation (R47).
    pub retries_reused: u64,
    /// Data records published.
    pub plans: u64,
    /// Rows of them.
    pub rows: u64,
    /// Pairs of ids of them.
    pub ids: u64,
    /// Bytes copied to the devices, over all ranks.
    pub bytes_h2d: u64,
    /// Bytes gathered by this process.
    pub cpu_gather_bytes: u64,
    /// Blocks that are leased or not free though nothing runs.
    pub leaked_blocks: u64,
    /// Blocks found in the host pool.
    pub pool_hits: u64,
    /// Blocks filled into the host pool.
    pub pool_fills: u64,
    /// How operations ended.
    pub completions: Completions,
    /// Latencies.
    pub latency_us: Latency,
    /// Wall time in seconds, from the open door to the end.
    pub wall_s: f64,
    /// What moving and keeping blocks cost.
    pub costs: Costs,
    /// What was played.
    pub trace: TraceSummary,
}

impl Summary {
    pub(super) fn new<C, R, P, T>(rounds: &Rounds<C, R, P, T>, wall_ns: u64, trace: TraceSummary) -> Self
    where
        C: SharedMut,
        R: Shared,
        P: SharedMut,
        T: Iterator<Item = Result<TraceRequest, TraceError>>,
    {
        let (tally, store) = (rounds.tally(), rounds.store().counts());
        let at = |quantile| tally.publish_to_done_ns.value_at_quantile(quantile) as f64 / 1000.0;
        let publish_to_done = Percentiles {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
        };
        Self {
            requests: tally.requests,
            requests_failed: tally.requests_failed,
            rounds: tally.rounds,
            preempted: tally.preempted,
            restarted: tally.restarted,
            resets: tally.resets,
            retries_reused: tally.retries_reused,
            plans: tally.plans,
            rows: tally.rows,
            ids: tally.ids,
            bytes_h2d: tally.costs.h2d_bytes,
            cpu_gather_bytes: tally.costs.cpu_gather_bytes,
            leaked_blocks: rounds.leaked_blocks(),
            pool_hits: store.hits,
            pool_fills: store.fills,
            completions: rounds.producer().counts().into(),
            latency_us: Latency { publish_to_done },
            wall_s: wall_ns as f64 / 1e9,
            costs: tally.costs,
            trace,
        }
    }
}
