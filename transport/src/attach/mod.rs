//! How processes find each other: the messages of attaching (X20) and of taking a channel over (X25).
//!
//! A worker attaches: `Hello` → `Welcome` with three descriptors → `Attached`, or `Refused`, or `Failed`. The producer's
//! side is [`Reception`], the worker's [`Joining`]. A new producer calls on every worker that it finds: `Takeover` →
//! `Surviving` with what the worker holds → perhaps `Report` → `Residency` → `Adopt` or `Drain`. The producer's side is
//! [`Takeover`], the worker's [`Survivor`]. All of them are polled: none blocks, none has a thread, none allocates per byte that a stranger sends.

mod joining;
mod porch;
mod reception;
mod survivor;
mod takeover;

use std::fmt;

use kvsluice_layout::ids::{ChannelId, Incarnation, PoolGeneration, ProcessEpoch, Rank};
use serde::{Deserialize, Serialize};

pub use joining::{Accepted, AttachError, Joining, Offer, Segments};
pub use porch::{Limits, Turned};
pub use reception::{Admission, Admitted, Arrival, Newcomer, Reception};
pub use survivor::{Holdings, Survivor, SurvivorState, Verdict};
pub use takeover::{RESIDENCY_BYTES_MAX, Reunion, Survived, Takeover, TakeoverError};

/// Version of these messages. Another major version is refused; a minor one only adds fields (X4).
pub const PROTOCOL: Protocol = Protocol { major: 1, minor: 0 };

/// A version of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// Raised when an older peer would misunderstand.
    pub major: u32,
    /// Raised when something is added.
    pub minor: u32,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What every first message begins with, whatever else its version says.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Envelope {
    protocol: Protocol,
}

/// Two sides that do not fit, told to both in the same words (X20).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct Mismatch {
    /// What was compared.
    pub field: String,
    /// What the other side has.
    pub found: String,
    /// What the side that found it out has or needs.
    pub expected: String,
    /// What to do.
    pub remedy: String,
    /// The process that is in the way, where one is.
    pub holder_pid: Option<u32>,
}

impl Mismatch {
    /// A mismatch that no process is in the way of.
    pub fn new(
        field: impl Into<String>,
        found: impl fmt::Display,
        expected: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            found: found.to_string(),
            expected: expected.to_string(),
            remedy: remedy.into(),
            holder_pid: None,
        }
    }

    /// A role that another process fills (X20).
    pub fn occupied(field: impl Into<String>, found: impl fmt::Display, holder_pid: Option<u32>) -> Self {
        let holder = holder_pid.map_or_else(|| "another process".into(), |pid| format!("pid {pid}"));
        Self {
            holder_pid,
            ..Self::new(field, found, holder, "stop that process first or use another channel")
        }
    }

    fn protocol(found: Protocol) -> Self {
        Self::new(
            "protocol version",
            found,
            PROTOCOL,
            "run the same kvsluice release on both sides",
        )
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A peer may have written this: no control characters in the log.
        let [field, found, expected, remedy] =
            [&self.field, &self.found, &self.expected, &self.remedy].map(|text| printable(text));
        write!(f, "{field} is {found}, expected {expected}; {remedy}")
    }
}

/// A text with whatever could change the look of a terminal escaped, and its quotes as they are.
fn printable(text: &str) -> String {
    let escape = |c: char| match c {
        '\'' | '"' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    text.chars().map(escape).collect()
}

/// A worker's first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Always the first thing to be compared.
    pub protocol: Protocol,
    /// Layout hash of the worker's build.
    pub layout_hash: u64,
    /// The rank that it wants to be.
    pub rank: Rank,
    /// Its process start.
    pub worker_epoch: ProcessEpoch,
    /// Its pid as it sees itself.
    pub pid: u32,
    /// What it can do (R20): compared by the producer.
    pub capability: serde_json::Value,
}

/// The producer's answer to a worker that fits. Comes with three descriptors: control and pool for reading, the rank's
/// own segment for writing. The geometry is not in it: the capability has its hash, the charter its text, at any length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the producer's messages.
    pub protocol: Protocol,
    /// The channel.
    pub channel: ChannelId,
    /// How often the channel was taken over.
    pub incarnation: Incarnation,
    /// The producer's process start.
    pub producer_epoch: ProcessEpoch,
    /// Number of ranks.
    pub ranks: u32,
    /// Lines of the plan ring.
    pub ring_lines: u64,
    /// Size of the write-back area in bytes.
    pub writeback_bytes: u64,
    /// Where the segments live.
    pub mode: crate::segment::Mode,
    /// The pools' generation.
    pub pool_generation: PoolGeneration,
    /// What the producer can do and what was agreed: compared by the worker.
    pub capability: serde_json::Value,
}

/// A new producer's first message to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Always the first thing to be compared.
    pub protocol: Protocol,
    /// Layout hash of the producer's build.
    pub layout_hash: u64,
    /// The new producer's process start.
    pub producer_epoch: ProcessEpoch,
    /// Its pid as it sees itself.
    pub pid: u32,
}

/// A worker's answer to a new producer. Comes with the descriptors of control, pool and the rank's own segment (X25).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surviving {
    /// The worker's rank.
    pub rank: Rank,
    /// Its process start.
    pub worker_epoch: ProcessEpoch,
    /// Its pid as it sees itself.
    pub pid: u32,
    /// The channel that it belongs to.
    pub channel: ChannelId,
    /// The incarnation that it worked for last.
    pub incarnation: Incarnation,
    /// The producer that it worked for last.
    pub producer_epoch: ProcessEpoch,
    /// Where the segments live.
    pub mode: crate::segment::Mode,
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum WorkerSays {
    /// It wants to attach.
    Hello(Hello),
    /// It has opened its segments and takes part.
    Attached,
    /// It does not fit what it was welcomed with.
    Failed(Mismatch),
    /// It outlived its producer.
    Surviving(Surviving),
    /// There is nothing to take over.
    NothingHeld,
    /// Comes with a parcel: what the worker knows of its device.
    Residency,
    /// It cannot be taken over.
    Refused(Mismatch),
}

/// What a producer says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ProducerSays {
    /// The worker fits.
    Welcome(Box<Welcome>),
    /// The worker does not fit.
    Refused(Mismatch),
    /// A new producer calls.
    Takeover(Call),
    /// The worker says what it knows of its device.
    Report,
    /// The worker goes on under the new producer.
    Adopt {
        /// The new incarnation.
        incarnation: Incarnation,
        /// The new producer's process start.
        producer_epoch: ProcessEpoch,
    },
    /// The worker finishes what it has and attaches anew.
    Drain {
        /// Why.
        reason: String,
    },
}

#[cfg(test)]
mod tests;
