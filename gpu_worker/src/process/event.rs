//! What a worker process tells: a person at the terminal, or its supervisor as JSON.

use serde::{Deserialize, Serialize};

/// What a worker process tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Attached; plans are taken from here on.
    Ready {
        /// This process.
        pid: u32,
        /// Its rank.
        rank: u32,
        /// Its device.
        device: String,
    },
    /// From time to time.
    Progress {
        /// Its rank.
        rank: u32,
        /// Bytes compared so far.
        verified_bytes: u64,
        /// Bytes among them that were something else.
        mismatched_bytes: u64,
        /// Records that were read a second time (X12): 0.
        repeated: u64,
    },
    /// The producer is proven dead. What it published is executed; a new producer may take over.
    ProducerLost {
        /// Its rank.
        rank: u32,
        /// The producer's process, 0 where it cannot be told.
        pid: u32,
        /// Position behind the last record that this rank has read: what a new producer must know of.
        consumed: u64,
    },
    /// A new producer has taken the channel over.
    Adopted {
        /// Its rank.
        rank: u32,
        /// The new incarnation.
        incarnation: u64,
    },
    /// A new producer starts cold, or none can find this worker any more: its device is given up, and it attaches anew.
    Drained {
        /// Its rank.
        rank: u32,
        /// Why; where a producer says so, in its words.
        reason: String,
    },
    /// The last event.
    Summary {
        /// Its rank.
        rank: u32,
        /// What was counted.
        operations: u64,
        /// Bytes copied from the host.
        bytes_h2d: u64,
        /// Bytes copied to the host.
        bytes_d2h: u64,
        /// Bytes moved inside the device.
        bytes_d2d: u64,
        /// Fragments submitted.
        fragments: u64,
        /// Bytes compared where an operation put them.
        verified_bytes: u64,
        /// Bytes compared in the blocks that the device's tables name, as attention reads them.
        #[serde(default)]
        verified_table_bytes: u64,
        /// Bytes that were something else.
        mismatched_bytes: u64,
        /// Records that were read a second time (X12): 0.
        repeated: u64,
    },
}
