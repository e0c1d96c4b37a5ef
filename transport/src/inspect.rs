//! A look at a channel from outside: `kvsluice inspect`.
//!
//! The segments of a live channel are read through the descriptors of the processes that hold its role locks, those of a
//! persistent one through their names. Nobody is asked, nothing is locked, mapped or written, so the channel does not
//! notice; what changes while it is read is read again, or left out with a note (X29: readers for diagnosis only poll).
//! Every byte may be a hostile peer's: it is copied first, and the copy goes through the decoders of the channel itself.

mod choice;
mod found;
mod journal;
mod picture;
mod report;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use kvsluice_layout::charter::Charter;
use kvsluice_layout::ids::{GroupId, Rank, SourceBlock};
use kvsluice_layout::region::{
    BROKEN_AT, BROKEN_FOUND_AT, CONSUMED_AT, DIRECTORY_ENTRY_BYTES, DIRECTORY_VALID, GENERATION_AT, INCARNATION_AT,
    PINNED_AT, PRODUCER_EPOCH_AT, PRODUCER_SLEEPING_AT, PRODUCER_WAKE_AT, RANK_GENERATION_AT, RECLAIM_AT, RegionMap,
    SLOTS_AT, TERMINALS_AT, WORKER_EPOCH_AT, WORKER_SLEEPING_AT, WORKER_WAKE_AT,
};
use kvsluice_layout::segment::{READY, SegmentKind};

use crate::lock::LockWatch;
use crate::members::read_member;
use crate::names::{ChannelName, ChannelNameError};
use crate::peers::Peers;
use crate::runtime_dir::{ChannelDir, RuntimeDir, RuntimeDirError};
use crate::shared::Shared;
use found::Found;
use journal::Journal;
use picture::{Picture, read_words};
pub use report::{
    AnswerReport, ControlReport, DirectoryReport, Inspection, LeaseReport, MemberReport, RankReport, RecordReport,
    RoleReport, SegmentReport,
};

/// Attempts to see a journal that does not change meanwhile.
const ATTEMPTS: usize = 8;
/// Bytes of the directory that are read at a time.
const DIRECTORY_STEP: usize = 1 << 20;

/// What is to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A channel of a runtime folder.
    Channel {
        /// The runtime folder.
        runtime: PathBuf,
        /// Its name.
        name: ChannelName,
    },
    /// The control segment of a persistent channel, dead or alive.
    Control(PathBuf),
}

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// No channel has this name.
    #[error(
        "no channel {name} in {runtime}; `kvsluice clean --list` shows which there are, --runtime-dir looks elsewhere"
    )]
    NoChannel {
        /// The name.
        name: ChannelName,
        /// The runtime folder.
        runtime: PathBuf,
    },
    /// The channel's folder cannot be used.
    #[error(transparent)]
    Folder(#[from] RuntimeDirError),
    /// A path that names no control segment.
    #[error("{path}: {wrong}; give the file NAME.control of a persistent channel, or the folder that holds it alone")]
    Path {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        wrong: String,
    },
    /// A name that no channel can have.
    #[error(transparent)]
    Name(#[from] ChannelNameError),
}

impl Target {
    /// What a user means by `text`: a path where it has a slash, else the name of a channel in `runtime`.
    ///
    /// # Errors
    /// [`InspectError::Name`], or [`InspectError::Path`] for a folder that does not hold one control segment.
    pub fn of(text: &str, runtime: &Path) -> Result<Self, InspectError> {
        if !text.contains('/') {
            let name = ChannelName::new(text)?;
            let runtime = runtime.to_owned();
            return Ok(Self::Channel { runtime, name });
        }
        let path = PathBuf::from(text);
        if !path.is_dir() {
            return Ok(Self::Control(path));
        }
        let wrong = |wrong: String| InspectError::Path {
            path: path.clone(),
            wrong,
        };
        let entries = path.read_dir().map_err(|error| wrong(error.to_string()))?;
        let of_control = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "control");
        let mut controls: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(of_control).collect();
        match (controls.pop(), controls.len()) {
            (Some(control), 0) => Ok(Self::Control(control)),
            (None, _) => Err(wrong("holds no file NAME.control".into())),
            (Some(_), others) => Err(wrong(format!("holds {} channels", others + 1))),
        }
    }
}

/// Looks at a channel.
///
/// # Errors
/// [`InspectError`] where there is none. What cannot be read of one that is there is said in its notes.
pub fn inspect(target: &Target) -> Result<Inspection, InspectError> {
    match target {
        Target::Channel { runtime, name } => inspect_channel(runtime, name),
        Target::Control(path) => inspect_files(path),
    }
}

fn inspect_channel(runtime: &Path, name: &ChannelName) -> Result<Inspection, InspectError> {
    let missing = || InspectError::NoChannel {
        name: name.clone(),
        runtime: runtime.to_owned(),
    };
    // Opening the folder would make it.
    if !runtime.is_dir() {
        return Err(missing());
    }
    let folder = RuntimeDir::open(runtime, &Peers::default())?;
    let dir = match folder.existing(name) {
        Err(RuntimeDirError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(missing());
        }
        dir => dir?,
    };
    let mut notes = Vec::new();
    let roles = roles(&dir, &mut notes)?;
    let mut pids: Vec<u32> = roles.iter().filter_map(|role| role.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let mut all: Vec<Found> = Vec::new();
    for found in pids.iter().flat_map(|pid| found::of_process(*pid, name, &mut notes)) {
        if all.iter().all(|other| other.identity != found.identity) {
            all.push(found);
        }
    }
    let live = roles.iter().any(|role| role.alive);
    if all.is_empty() {
        let gone = "no segments were found: anonymous ones end with the processes that hold them; \
                    for those of a persistent channel, give the path of NAME.control";
        notes.push(gone.into());
    }
    Ok(describe(name.to_string(), live, roles, all, notes))
}

fn inspect_files(path: &Path) -> Result<Inspection, InspectError> {
    let wrong = |wrong: String| InspectError::Path {
        path: path.to_owned(),
        wrong,
    };
    let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
    let name = file
        .strip_suffix(".control")
        .ok_or_else(|| wrong("is no file NAME.control".into()))?;
    let name = ChannelName::new(name)?;
    let mut notes = Vec::new();
    let all = found::beside(path, &name, &mut notes).map_err(|error| wrong(error.to_string()))?;
    let holders = all.first().map(found::holders).unwrap_or_default();
    let mut inspection = describe(name.to_string(), !holders.is_empty(), Vec::new(), all, notes);
    inspection.holders = holders;
    Ok(inspection)
}

fn roles(dir: &ChannelDir, notes: &mut Vec<String>) -> Result<Vec<RoleReport>, InspectError> {
    let mut roles = dir.roles("lock")?;
    roles.extend(dir.roles("sock")?);
    roles.sort_unstable();
    roles.dedup();
    let mut reports = Vec::new();
    for role in roles {
        let watch = LockWatch::open(dir, role, None)?;
        let holder = watch.and_then(|watch| {
            watch.holder().unwrap_or_else(|error| {
                notes.push(format!("the lock of {role} cannot be asked for: {error}"));
                None
            })
        });
        if holder.is_some_and(|holder| holder.pid.is_none()) {
            notes.push(format!(
                "{role} lives in another pid namespace: run this there to see its segments"
            ));
        }
        reports.push(RoleReport {
            role: role.to_string(),
            alive: holder.is_some(),
            pid: holder.and_then(|holder| holder.pid),
            epoch: holder.and_then(|holder| holder.said).map(|(epoch, _)| hex(epoch.0)),
        });
    }
    Ok(reports)
}

/// Describes what was found; never fails, whatever the bytes are.
fn describe(
    channel: String,
    live: bool,
    roles: Vec<RoleReport>,
    all: Vec<Found>,
    mut notes: Vec<String>,
) -> Inspection {
    let epochs: Vec<&str> = roles.iter().filter_map(|role| role.epoch.as_deref()).collect();
    let control = choice::control(&all, &epochs, &mut notes);
    let mut segments = Vec::new();
    let mut ranks = Vec::new();
    let mut report = None;
    if let Some((control, head, charter, map)) = &control {
        let mut own: Vec<(Rank, &Found)> = Vec::new();
        for found in all
            .iter()
            .filter(|found| found.header.channel == control.header.channel)
        {
            let SegmentKind::Rank(rank) = found.kind else { continue };
            let member = read_member(head, map, rank);
            match choice::of_member(found, &member, map) {
                Ok(()) => own.push((rank, found)),
                Err(why) => notes.push(format!("{}: {why}", found.path.display())),
            }
        }
        let (control, of_ranks) = read_channel(control, charter, map, &own, &mut notes);
        (report, ranks) = (control, of_ranks);
    }
    for found in &all {
        let ours = control
            .as_ref()
            .is_none_or(|(control, ..)| control.header.channel == found.header.channel);
        if ours {
            segments.push(segment_report(found));
        }
    }
    segments.sort_by(|one, two| (&one.segment, &one.path).cmp(&(&two.segment, &two.path)));
    Inspection {
        channel,
        live,
        roles,
        holders: Vec::new(),
        segments,
        control: report,
        ranks,
        notes,
    }
}

/// Reads the journal with the ranks' answers, and everything else.
fn read_channel(
    control: &Found,
    charter: &Charter,
    map: &RegionMap,
    ranks: &[(Rank, &Found)],
    notes: &mut Vec<String>,
) -> (Option<ControlReport>, Vec<RankReport>) {
    let groups = charter.geometry.groups.len() as u32;
    let mut attempt = 0;
    let (head, pictures, journal) = loop {
        attempt += 1;
        match take_pictures(control, map, ranks) {
            Ok((head, pictures)) => {
                let journal = journal::read(&head, map, groups, &pictures);
                // The word at the tail is 0 (X10); any other is of a lap that the producer was on meanwhile.
                let end = map.ring_at() + (journal.tail.0 as usize & (map.ring_bytes() - 1));
                let passed = head.load(end) != 0;
                if attempt == ATTEMPTS || !(passed || journal.broken.is_some()) {
                    break (head, pictures, journal);
                }
            }
            Err(error) => {
                notes.push(format!("{} cannot be read: {error}", control.path.display()));
                return (None, Vec::new());
            }
        }
    };
    notes.extend(journal.broken.as_ref().map(|broken| broken.to_string()));
    let reports = pictures
        .iter()
        .map(|(rank, picture)| rank_report(*rank, picture))
        .collect();
    let directory = (0..groups)
        .map(|group| directory(control, charter, map, group, notes))
        .collect();
    (Some(control_report(&head, charter, map, journal, directory)), reports)
}

/// What copies of a control segment and of its ranks' segments say, from their first bytes on: the part of [`inspect`]
/// that reads what peers wrote. The directory is left out.
pub fn describe_copies(
    control: Vec<u64>,
    charter: &Charter,
    map: &RegionMap,
    ranks: Vec<(Rank, Vec<u64>)>,
) -> (ControlReport, Vec<RankReport>) {
    let control = Picture::of(control);
    let of_ranks = ranks.into_iter().map(|(rank, words)| (rank, Picture::of(words)));
    let pictures: Vec<_> = of_ranks.collect();
    let journal = journal::read(&control, map, charter.geometry.groups.len() as u32, &pictures);
    let reports = pictures.iter().map(|(rank, picture)| rank_report(*rank, picture));
    let reports = reports.collect();
    (control_report(&control, charter, map, journal, Vec::new()), reports)
}

/// Copies the ring, then the slots, then `reclaim`: no byte of a record at or above the `reclaim` that is read last was
/// reused before it was copied (X10), and neither was its slot (X12).
fn take_pictures(
    control: &Found,
    map: &RegionMap,
    ranks: &[(Rank, &Found)],
) -> io::Result<(Picture, Vec<(Rank, Picture)>)> {
    let mut head = Picture::take(&control.file, map.ring_at() + map.ring_bytes())?;
    let mut pictures = Vec::new();
    for (rank, found) in ranks {
        pictures.push((*rank, Picture::take(&found.file, SLOTS_AT + map.ring_bytes())?));
    }
    // pairs with: ring::PlanWriter::store_record, which stores reclaim before any byte below it is overwritten.
    fence(Ordering::Acquire);
    let words = read_words(&control.file, RECLAIM_AT as u64, 1)?;
    head.replace(RECLAIM_AT, words.first().copied().unwrap_or(0));
    Ok((head, pictures))
}

fn control_report(
    head: &Picture,
    charter: &Charter,
    map: &RegionMap,
    journal: Journal,
    directory: Vec<DirectoryReport>,
) -> ControlReport {
    let member = |rank| {
        let member = read_member(head, map, Rank(rank));
        let there = member.epoch.0 != 0;
        MemberReport {
            rank,
            epoch: there.then(|| hex(member.epoch.0)),
            first: there.then_some(member.first.0),
        }
    };
    ControlReport {
        incarnation: head.load(INCARNATION_AT),
        producer_epoch: hex(head.load(PRODUCER_EPOCH_AT)),
        generation: head.load(GENERATION_AT),
        reclaim: journal.reclaim.0,
        tail: journal.tail.0,
        sleeping: head.load(PRODUCER_SLEEPING_AT) != 0,
        wakes: head.load_u32(PRODUCER_WAKE_AT),
        ring_bytes: map.ring_bytes() as u64,
        capability: charter.capability.clone(),
        model: charter.geometry.model.clone(),
        members: (0..map.ranks()).map(member).collect(),
        journal: journal.records,
        leases: journal.leases,
        directory,
    }
}

fn rank_report(rank: Rank, segment: &Picture) -> RankReport {
    let broken = segment.load(BROKEN_AT);
    RankReport {
        rank: rank.0,
        worker_epoch: hex(segment.load(WORKER_EPOCH_AT)),
        generation: segment.load(RANK_GENERATION_AT),
        pinned_bytes: segment.load(PINNED_AT),
        consumed: segment.load(CONSUMED_AT),
        terminals: segment.load(TERMINALS_AT),
        broken: (broken != 0).then(|| (broken - 1, segment.load(BROKEN_FOUND_AT))),
        sleeping: segment.load(WORKER_SLEEPING_AT) != 0,
        wakes: segment.load_u32(WORKER_WAKE_AT),
    }
}

/// Counts the directory entries of a group.
fn directory(
    control: &Found,
    charter: &Charter,
    map: &RegionMap,
    group: u32,
    notes: &mut Vec<String>,
) -> DirectoryReport {
    let blocks = charter
        .geometry
        .group(GroupId(group))
        .map_or(0, |group| group.source_blocks);
    let begin = map.directory_at(GroupId(group), SourceBlock(0)).unwrap_or(0);
    let end = begin + blocks as usize * DIRECTORY_ENTRY_BYTES;
    let mut valid = 0;
    for at in (begin..end).step_by(DIRECTORY_STEP) {
        let bytes = DIRECTORY_STEP.min(end - at);
        match read_words(&control.file, at as u64, bytes / 8) {
            Ok(words) => {
                let states = words.iter().step_by(DIRECTORY_ENTRY_BYTES / 8);
                valid += states.filter(|state| *state & DIRECTORY_VALID != 0).count() as u64;
            }
            Err(error) => {
                notes.push(format!("the directory of group {group} cannot be read: {error}"));
                break;
            }
        }
    }
    DirectoryReport {
        group,
        valid,
        invalid: u64::from(blocks) - valid.min(u64::from(blocks)),
    }
}

fn segment_report(found: &Found) -> SegmentReport {
    let header = &found.header;
    SegmentReport {
        segment: found.kind.to_string(),
        path: found.path.display().to_string(),
        mode: found.mode,
        bytes: found.bytes,
        layout_version: format!("{}.{}", header.major, header.minor),
        layout_hash: hex(header.layout_hash.get()),
        boot_id: header.boot_id.iter().map(|byte| format!("{byte:02x}")).collect(),
        channel_id: hex(header.channel.get()),
        creator_epoch: hex(header.creator_epoch.get()),
        ready: header.ready.get() == READY,
        refused: found.refused.clone(),
    }
}

fn hex(word: u64) -> String {
    format!("{word:016x}")
}

#[cfg(test)]
mod tests;
