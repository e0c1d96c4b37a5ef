//! What an inspection found: for programs as JSON, for people as text.

use std::fmt;

use kvsluice_layout::capability::Capability;
use serde::Serialize;

/// Records that are shown to people; programs get all of them.
const RECORDS_SHOWN: usize = 32;

/// A channel as it was a moment ago. Hashes and epochs, which have 64 random bits, are hexadecimal text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the channel.
    pub channel: String,
    /// True where some process takes part in it.
    pub live: bool,
    /// Who fills its roles; empty for a channel that was named by its files.
    pub roles: Vec<RoleReport>,
    /// Processes that use its named segments, by the kernel's word.
    pub holders: Vec<u32>,
    /// The segments that were found.
    pub segments: Vec<SegmentReport>,
    /// The control segment, where it could be read.
    pub control: Option<ControlReport>,
    /// The rank segments that could be read.
    pub ranks: Vec<RankReport>,
    /// What could not be looked at, and why.
    pub notes: Vec<String>,
}

/// A role of the channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoleReport {
    /// `producer` or `rank-R`.
    pub role: String,
    /// True while its lock is held, by the kernel's word (X23).
    pub alive: bool,
    /// The holder's process; `None` where nobody holds it, or where the holder has no pid here (X28).
    pub pid: Option<u32>,
    /// The epoch that stands in its lock file.
    pub epoch: Option<String>,
}

/// The header of a segment (X3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentReport {
    /// `control`, `pool` or `rank-R`.
    pub segment: String,
    /// Where it was found.
    pub path: String,
    /// `memfd`, `hardened` or `file`.
    pub mode: &'static str,
    /// Its size in bytes.
    pub bytes: u64,
    /// Layout version of its maker.
    pub layout_version: String,
    /// Layout hash of its maker.
    pub layout_hash: String,
    /// Boot under which it was made.
    pub boot_id: String,
    /// Channel id.
    pub channel_id: String,
    /// Process start that made it.
    pub creator_epoch: String,
    /// True once its maker has said that it is whole.
    pub ready: bool,
    /// Why it is not read beyond its header.
    pub refused: Option<String>,
}

/// What the control segment says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ControlReport {
    /// How often the channel was taken over, and once more.
    pub incarnation: u64,
    /// Process start of the producer.
    pub producer_epoch: String,
    /// Generation of the device pools.
    pub generation: u64,
    /// Position below which the ring may be reused.
    pub reclaim: u64,
    /// Position behind the last record.
    pub tail: u64,
    /// True while the producer sleeps.
    pub sleeping: bool,
    /// Its wake counter.
    pub wakes: u32,
    /// Bytes of the plan ring.
    pub ring_bytes: u64,
    /// What the maker of the channel can do.
    pub capability: Capability,
    /// Name of the model.
    pub model: String,
    /// Who answers for each rank.
    pub members: Vec<MemberReport>,
    /// The records in flight, oldest first.
    pub journal: Vec<RecordReport>,
    /// Blocks that they lease, by group.
    pub leases: Vec<LeaseReport>,
    /// The block directory, by group.
    pub directory: Vec<DirectoryReport>,
}

/// A membership entry (X24).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberReport {
    /// The rank.
    pub rank: u32,
    /// Process start of its worker; `None` while it is missing.
    pub epoch: Option<String>,
    /// First record that it answers.
    pub first: Option<u64>,
}

/// A record of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecordReport {
    /// Its position.
    pub position: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// What it asks for.
    pub kind: &'static str,
    /// The request's id, what is not ASCII escaped.
    pub request: String,
    /// The request's epoch.
    pub request_epoch: u64,
    /// Its operation.
    pub operation: u64,
    /// Generation of the device pools.
    pub generation: u64,
    /// Map revision g that it leads to.
    pub map_revision: u64,
    /// Selection revision r that it leads to.
    pub selection_revision: u64,
    /// The position that an Abort names.
    pub target: Option<u64>,
    /// Its rows.
    pub rows: u32,
    /// Its id pairs.
    pub pairs: u32,
    /// The producer that wrote it.
    pub producer_epoch: String,
    /// What each rank has answered.
    pub ranks: Vec<AnswerReport>,
}

/// A rank's answer to a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AnswerReport {
    /// The rank.
    pub rank: u32,
    /// `open`, `done`, `superseded`, `rejected`, `failed`, `rank_lost`; `conflicting` for an answer that is not the
    /// record's, `stray` for a word that is no answer, `unknown` where the rank's segment could not be read.
    pub state: &'static str,
    /// Why it was rejected.
    pub reason: Option<&'static str>,
    /// Bytes moved.
    pub bytes_moved: u64,
    /// Device time in nanoseconds.
    pub device_ns: u64,
}

/// Blocks of a group that the records in flight lease (X14).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseReport {
    /// The group.
    pub group: u32,
    /// Blocks of the host pool.
    pub source_blocks: usize,
    /// Blocks of the device pools.
    pub device_blocks: usize,
}

/// The directory of a group's blocks (X25a).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirectoryReport {
    /// The group.
    pub group: u32,
    /// Blocks whose entry vouches for their bytes.
    pub valid: u64,
    /// The others.
    pub invalid: u64,
}

/// What a rank segment says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// Process start of its worker.
    pub worker_epoch: String,
    /// Generation of its device pool.
    pub generation: u64,
    /// Bytes of the pool that it has registered.
    pub pinned_bytes: u64,
    /// Position behind the last record that it has read.
    pub consumed: u64,
    /// Records that it has answered.
    pub terminals: u64,
    /// Position of a record with broken framing, and the word that it found there.
    pub broken: Option<(u64, u64)>,
    /// True while it sleeps.
    pub sleeping: bool,
    /// Its wake counter.
    pub wakes: u32,
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let life = if self.live { "live" } else { "nobody takes part" };
        writeln!(f, "channel {}: {life}", self.channel)?;
        for role in &self.roles {
            let pid = role.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
            let (life, epoch) = (if role.alive { "alive" } else { "free" }, text(role.epoch.as_deref()));
            writeln!(f, "  {:<9} {life:<6} pid {pid:<8} epoch {epoch}", role.role)?;
        }
        if !self.holders.is_empty() {
            writeln!(f, "  its named segments are used by pid {:?}", self.holders)?;
        }
        writeln!(f, "segments")?;
        for segment in &self.segments {
            segment.fmt(f)?;
        }
        if let Some(control) = &self.control {
            control.fmt(f)?;
        }
        for rank in &self.ranks {
            rank.fmt(f)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

impl fmt::Display for SegmentReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ready = if self.ready { "ready" } else { "not ready" };
        let Self {
            segment,
            mode,
            bytes,
            path,
            ..
        } = self;
        writeln!(f, "  {segment:<9} {mode:<8} {bytes:>14} bytes, {ready}, {path}")?;
        let (version, hash, boot) = (&self.layout_version, &self.layout_hash, &self.boot_id);
        let (channel, creator) = (&self.channel_id, &self.creator_epoch);
        writeln!(
            f,
            "            layout {version} {hash}, boot {boot}, channel {channel}, made by {creator}"
        )?;
        match &self.refused {
            Some(refused) => writeln!(f, "            {refused}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ControlReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (incarnation, generation, wakes) = (self.incarnation, self.generation, self.wakes);
        writeln!(
            f,
            "control: incarnation {incarnation}, producer {}, pool generation {generation}, {}, {wakes} wakes",
            self.producer_epoch,
            sleeps(self.sleeping)
        )?;
        let capability = &self.capability;
        let agreed = (capability.selection_unit, capability.source_kinds, capability.dtype);
        writeln!(f, "  model {:?}, {}", self.model, shown(agreed))?;
        let (reclaim, tail, ring) = (self.reclaim, self.tail, self.ring_bytes);
        let used = tail.saturating_sub(reclaim);
        writeln!(f, "  ring: [{reclaim}, {tail}), {used} of {ring} bytes in flight")?;
        for member in &self.members {
            match member.first {
                Some(first) => writeln!(
                    f,
                    "  rank {}: {} from {first} on",
                    member.rank,
                    text(member.epoch.as_deref())
                )?,
                None => writeln!(f, "  rank {}: missing", member.rank)?,
            }
        }
        writeln!(f, "journal: {} records", self.journal.len())?;
        for record in self.journal.iter().take(RECORDS_SHOWN) {
            record.fmt(f)?;
        }
        if self.journal.len() > RECORDS_SHOWN {
            writeln!(
                f,
                "  and {} more (--json shows all)",
                self.journal.len() - RECORDS_SHOWN
            )?;
        }
        for (lease, directory) in self.leases.iter().zip(&self.directory) {
            let (group, sources, devices) = (lease.group, lease.source_blocks, lease.device_blocks);
            let (valid, all) = (directory.valid, directory.valid + directory.invalid);
            writeln!(
                f,
                "group {group}: {sources} host and {devices} device blocks leased; {valid} of {all} host blocks valid"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for RecordReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            position,
            kind,
            request,
            operation,
            rows,
            pairs,
            ..
        } = self;
        write!(
            f,
            "  {position:>12} {kind:<10} request \"{request}\" operation {operation}, {rows} rows, {pairs} pairs:"
        )?;
        self.ranks.iter().try_for_each(|answer| {
            write!(f, " {}={}", answer.rank, answer.state)?;
            answer.reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))
        })?;
        writeln!(f)
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            generation,
            pinned_bytes,
            consumed,
            terminals,
            wakes,
            ..
        } = self;
        writeln!(
            f,
            "rank {rank}: worker {}, pool generation {generation}, {pinned_bytes} bytes pinned, consumed {consumed}, \
             {terminals} answers, {}, {wakes} wakes",
            self.worker_epoch,
            sleeps(self.sleeping)
        )?;
        match self.broken {
            Some((position, found)) => writeln!(f, "  reports a broken record at {position}: found {found:#x}"),
            None => Ok(()),
        }
    }
}

fn sleeps(sleeping: bool) -> &'static str {
    if sleeping { "asleep" } else { "awake" }
}

fn text(of: Option<&str>) -> &str {
    of.unwrap_or("-")
}

/// The parts of a capability that say how blocks move; what is missing as `missing`.
fn shown<U: Serialize, S: Serialize, D: Serialize>((unit, kinds, dtype): (Option<U>, Option<S>, Option<D>)) -> String {
    let json = |value: Option<serde_json::Value>| value.map_or("missing".to_owned(), |value| value.to_string());
    let [unit, kinds, dtype] = [
        unit.map(|unit| serde_json::json!(unit)),
        kinds.map(|kinds| serde_json::json!(kinds)),
        dtype.map(|dtype| serde_json::json!(dtype)),
    ]
    .map(json);
    format!("selection unit {unit}, sources {kinds}, dtype {dtype}")
}
