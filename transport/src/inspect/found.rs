//! Where the segments of a channel are found without asking anybody for them: among the descriptors of the processes
//! that hold its role locks, or under their names.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use kvsluice_layout::ids::{MAX_RANKS, Rank};
use kvsluice_layout::region::layout_hash;
use kvsluice_layout::segment::{Expected, HEADER_BYTES, SegmentHeader, SegmentKind};
use rustix::fs::{FileType, Mode, OFlags, SealFlags, fcntl_get_seals, fstat, major, minor};

use super::picture::read_words;
use crate::names::ChannelName;
use crate::segment::{Identity, boot_id};

/// A segment that was found, open for reading.
pub(super) struct Found {
    pub(super) kind: SegmentKind,
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
    pub(super) header: SegmentHeader,
    /// Anonymous, of sealed size, or a file.
    pub(super) mode: &'static str,
    /// Why it cannot be read beyond its header.
    pub(super) refused: Option<String>,
}

impl Found {
    /// Opens what may be a segment, for reading only.
    fn open(path: PathBuf, kind: SegmentKind) -> io::Result<Self> {
        // Never through a link that somebody put there; the links of /proc are the kernel's.
        let follow = if path.starts_with("/proc") {
            OFlags::empty()
        } else {
            OFlags::NOFOLLOW
        };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | follow;
        let descriptor = rustix::fs::open(&path, flags, Mode::empty())?;
        let stat = fstat(&descriptor)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no plain file"));
        }
        let mode = match fcntl_get_seals(&descriptor) {
            Ok(seals) if seals.contains(SealFlags::FUTURE_WRITE) => "hardened",
            Ok(seals) if seals.contains(SealFlags::SHRINK) => "memfd",
            _ => "file",
        };
        let file = File::from(descriptor);
        let mut words = [0; HEADER_BYTES / 8];
        words.copy_from_slice(&read_words(&file, 0, HEADER_BYTES / 8)?);
        let header = SegmentHeader::from_words(&words);
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let reserved = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        let expected = Expected {
            kind,
            size_bytes: bytes,
            layout_hash: layout_hash(),
            boot_id: boot_id()?,
            channel: None,
            creator_epoch: None,
        };
        let mut refused = header.check(&expected).err().map(|refused| refused.to_string());
        // X33: a file of holes costs its maker nothing and its reader the memory.
        if reserved < bytes && refused.is_none() {
            refused = Some(format!(
                "{kind} segment has {bytes} bytes, but only {reserved} are there"
            ));
        }
        Ok(Self {
            kind,
            identity: Identity::of(&stat),
            path,
            file,
            bytes,
            header,
            mode,
            refused,
        })
    }

    /// True for a segment that can be read beyond its header.
    pub(super) fn is_whole(&self) -> bool {
        self.refused.is_none()
    }
}

/// The segments that a process has descriptors of, by their names: anonymous ones, and the named ones of `channel`.
pub(super) fn of_process(pid: u32, channel: &ChannelName, notes: &mut Vec<String>) -> Vec<Found> {
    let folder = format!("/proc/{pid}/fd");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) => {
            notes.push(format!(
                "{folder} cannot be read ({error}): run this as the user of pid {pid}"
            ));
            return Vec::new();
        }
    };
    let mut all: Vec<Found> = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        // A descriptor may be closed between the look and the open.
        let Ok(target) = std::fs::read_link(&path) else {
            continue;
        };
        let Some(kind) = target.to_str().and_then(|target| kind_of(target, channel)) else {
            continue;
        };
        match Found::open(path.clone(), kind) {
            Ok(found) if all.iter().all(|other| other.identity != found.identity) => all.push(found),
            Ok(_) => {}
            Err(error) => notes.push(format!("{} ({kind}) cannot be read: {error}", path.display())),
        }
    }
    all
}

/// The segment that a descriptor's target is by its name.
fn kind_of(target: &str, channel: &ChannelName) -> Option<SegmentKind> {
    let target = target.strip_suffix(" (deleted)").unwrap_or(target);
    if let Some(name) = target.strip_prefix("/memfd:kvsluice ") {
        return named(name);
    }
    let file = target.rsplit('/').next()?;
    named(file.strip_prefix(channel.as_str())?.strip_prefix('.')?)
}

fn named(name: &str) -> Option<SegmentKind> {
    let ranks = (0..MAX_RANKS).map(|rank| SegmentKind::Rank(Rank(rank)));
    let mut kinds = [SegmentKind::Control, SegmentKind::Pool].into_iter().chain(ranks);
    kinds.find(|kind| kind.to_string() == name)
}

/// The named segments beside a control segment, with it.
///
/// # Errors
/// The system's, for the control segment.
pub(super) fn beside(control: &Path, channel: &ChannelName, notes: &mut Vec<String>) -> io::Result<Vec<Found>> {
    let mut all = vec![Found::open(control.to_owned(), SegmentKind::Control)?];
    let ranks = (0..MAX_RANKS).map(|rank| SegmentKind::Rank(Rank(rank)));
    for kind in [SegmentKind::Pool].into_iter().chain(ranks) {
        let path = control.with_file_name(format!("{channel}.{kind}"));
        match Found::open(path.clone(), kind) {
            Ok(found) => all.push(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => notes.push(format!("{} cannot be read: {error}", path.display())),
        }
    }
    Ok(all)
}

/// Processes that say that they use a named segment (X26), by the kernel's list of locks. Asking for the lock instead
/// would keep it from somebody for a moment.
pub(super) fn holders(control: &Found) -> Vec<u32> {
    let (device, inode) = (control.identity.device, control.identity.inode);
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let Ok(locks) = std::fs::read_to_string("/proc/locks") else {
        return Vec::new();
    };
    let holder = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, pid, of) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && of == file).then(|| pid.parse().ok())?
    };
    let mut pids: Vec<u32> = locks.lines().filter_map(holder).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}
