//! What a producer tells its caller: why a draft was not published, how an operation ended, and what was counted.

use kvsluice_layout::ids::{Position, Rank};
use kvsluice_layout::plan::Operation;
use kvsluice_layout::record::{Kind, Terminal};
use kvsluice_layout::refusal::Refusal;
use thiserror::Error;

/// Who keeps the ring from moving: named in every error about a full ring (X17).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Oldest {
    /// Position of the oldest record in flight.
    pub position: Position,
    /// Its operation.
    pub operation_id: u64,
    /// The first rank that has not answered it.
    pub rank: Rank,
    /// That rank's process.
    pub pid: u32,
}

impl std::fmt::Display for Oldest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            position,
            operation_id,
            rank,
            pid,
        } = self;
        write!(
            f,
            "operation {operation_id} at {position}, held by rank {rank} (pid {pid})"
        )
    }
}

/// Why a draft was not published. The draft is as it was, and nothing is leased.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PublishError {
    /// The plan breaks a rule (X9).
    #[error("plan refused: {0}")]
    Refused(#[from] Refusal),
    /// The record can never fit the ring.
    #[error("record of {bytes} bytes: the largest that this ring takes is {limit}: split the plan or enlarge the ring")]
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Largest record.
        limit: u64,
    },
    /// The ring is full (X17).
    #[error("ring full: {needed} bytes needed, {free} free; {}", oldest.map_or(String::new(), |o| format!("oldest: {o}")))]
    Full {
        /// Bytes needed, padding at the wrap included.
        needed: u64,
        /// Bytes free for this kind of record.
        free: u64,
        /// The oldest record in flight.
        oldest: Option<Oldest>,
    },
    /// A rank has no worker (X24).
    #[error("rank {rank} is missing (last pid {pid}): only Abort and Reset pass until a worker attaches")]
    RankMissing {
        /// The rank.
        rank: Rank,
        /// Process that held it last, 0 for none.
        pid: u32,
    },
    /// A rank's device is of another generation (X24).
    #[error("rank {rank} is at pool generation {found}, expected {expected}: publish a Reset and await it")]
    ResetNeeded {
        /// The rank.
        rank: Rank,
        /// Its generation.
        found: u64,
        /// The channel's.
        expected: u64,
    },
    /// An Abort that names nothing in flight.
    #[error("abort of {position}: no operation in flight is there: it is terminal already")]
    NotInFlight {
        /// The position.
        position: Position,
    },
}

/// How an operation ended, over all ranks (X12).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Position of the record.
    pub position: Position,
    /// Kind of the record.
    pub kind: Kind,
    /// What it would lead to.
    pub operation: Operation,
    /// The worst terminal of all ranks: the operation may commit only if this is Done.
    pub terminal: Terminal,
    /// A rank with that terminal.
    pub rank: Rank,
    /// Reason of a Rejected, see [`kvsluice_layout::refusal::reason`].
    pub reason: u16,
    /// Row that the reason names, or `u32::MAX`.
    pub row: u32,
    /// Bytes moved, summed over ranks.
    pub bytes_moved: u64,
    /// Device time in nanoseconds, the longest of the ranks.
    pub device_ns: u64,
    /// Digest of the request's device state, where all ranks gave the same one (I9).
    pub digest: Option<u64>,
    /// The record was published by an earlier producer and taken over with the journal.
    pub recovered: bool,
}

/// What the producer counted since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Operations that were published, or taken over with the journal: once nothing is in flight, as many have ended.
    pub published: u64,
    /// Operations that ended Done.
    pub done: u64,
    /// Operations that ended Failed.
    pub failed: u64,
    /// Operations that ended Rejected.
    pub rejected: u64,
    /// Operations that ended Superseded.
    pub superseded: u64,
    /// Operations that ended RankLost.
    pub rank_lost: u64,
    /// Answers that repeat one already taken.
    pub duplicate: u64,
    /// Words in a slot that answer no record of its line.
    pub stale: u64,
    /// Answers that do not belong to the record they answer: the operation fails on that rank (X16).
    pub conflicting: u64,
}
