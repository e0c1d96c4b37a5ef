//! Segments: made by the producer, checked by whoever receives one, mapped as far as its role allows (X3, X3a, X21).
//!
//! The producer [`create`]s every segment, stores what belongs into it and calls [`Created::make_ready`]. A peer that
//! receives a descriptor opens it with [`open_reader`] or [`open_writer`], which map nothing that is not whole, not of
//! the right owner or not sealed. A new producer gets a surviving segment back with [`reopen_writable`].

mod mapping;
mod memfd;
mod persistent;
mod reserve;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use kvsluice_layout::ids::{ChannelId, ProcessEpoch};
use kvsluice_layout::planted::planted;
use kvsluice_layout::segment::{Expected, HEADER_BYTES, READY, READY_AT, SegmentHeader, SegmentKind, SegmentRefused};
use rustix::fs::{FileType, Mode as Bits, OFlags, SealFlags, Stat, fcntl_get_seals, fstat, fstatfs};
use serde::{Deserialize, Serialize};

pub use mapping::{Mapping, MappingMut};
pub use memfd::Memfd;
pub(crate) use persistent::is_memory;
pub use persistent::{PersistError, Persistent, hold};
pub use reserve::{CreateError, HugePages, Reserve};

use crate::peers::Peers;
use crate::shared::{Shared, SharedMut};

/// Where a channel's segments live, and what that promises (X21).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Anonymous, of sealed size. Any surviving worker can hand them to a new producer.
    Memfd,
    /// As memfd, and nobody but the running producer can ever write control and pool. A new producer starts cold.
    Hardened,
    /// Named files that survive both sides, among peers of one user that trust each other.
    Persistent,
}

impl Mode {
    /// True where `segment` is sealed against every writer that comes later.
    pub fn seals_writes(self, segment: SegmentKind) -> bool {
        self == Self::Hardened && !matches!(segment, SegmentKind::Rank(_))
    }

    /// The seals that a descriptor of `segment` must carry.
    fn seals(self, segment: SegmentKind) -> SealFlags {
        match self {
            Self::Persistent => SealFlags::empty(),
            _ if self.seals_writes(segment) => memfd::SIZE_SEALS | SealFlags::FUTURE_WRITE,
            _ => memfd::SIZE_SEALS,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memfd => "memfd",
            Self::Hardened => "hardened",
            Self::Persistent => "persistent",
        })
    }
}

/// How one mode makes and removes a segment.
pub trait Backend {
    /// The mode.
    fn mode(&self) -> Mode;

    /// A new, empty segment, open for reading and writing by this process only.
    ///
    /// # Errors
    /// The system's error; `AlreadyExists` where the mode has names and this one is taken.
    fn create(&self, segment: SegmentKind, huge: Option<HugePages>) -> io::Result<OwnedFd>;

    /// Fixes what can be fixed once the segment has its size and its writer has mapped it.
    ///
    /// # Errors
    /// The system's error.
    fn seal(&self, segment: SegmentKind, descriptor: &OwnedFd) -> io::Result<()>;

    /// Removes the segment's name, if it has one and the name still means this very file.
    ///
    /// # Errors
    /// The system's error.
    fn discard(&self, segment: SegmentKind, identity: Identity) -> io::Result<()>;
}

/// Which file a name or a descriptor means. Two names that differ here are two files, whatever they are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device of the file system.
    pub device: u64,
    /// Number of the file in it.
    pub inode: u64,
}

impl Identity {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }

    /// The file behind a descriptor.
    ///
    /// # Errors
    /// The system's error.
    pub fn of_descriptor(descriptor: impl AsFd) -> io::Result<Self> {
        Ok(Self::of(&fstat(descriptor)?))
    }
}

/// What the header of a new segment says (X3).
#[derive(Clone, Copy, Debug)]
pub struct NewSegment {
    /// What it will hold.
    pub kind: SegmentKind,
    /// Bytes that are needed; rounded up to whole pages.
    pub bytes: usize,
    /// The layout hash of this build.
    pub layout_hash: u64,
    /// The channel.
    pub channel: ChannelId,
    /// The process start that makes it.
    pub creator_epoch: ProcessEpoch,
}

/// A segment that this process made and has mapped, with its header in place but for the ready word.
pub struct Created {
    /// What it holds.
    pub kind: SegmentKind,
    /// The segment, open for reading and writing.
    pub descriptor: OwnedFd,
    /// The segment, mapped.
    pub memory: MappingMut,
}

impl Created {
    /// Says that everything in the segment is in place: the last store of its making (X3).
    pub fn make_ready(&self) {
        // pairs with: open, which loads the ready word first.
        self.memory.store_release(READY_AT, READY);
    }

    /// Gives up writing: the descriptor, which goes to the rank that owns the segment, and a mapping for reading (X3a).
    ///
    /// # Errors
    /// The system's error where the segment cannot be mapped a second time.
    pub fn hand_over(self) -> io::Result<(OwnedFd, Mapping)> {
        let reader = Mapping::read_only(&self.descriptor, self.memory.size())?;
        Ok((self.descriptor, reader))
    }
}

/// Makes a segment: sized, reserved, pre-faulted, headed, sealed and mapped (X3a, X30). The ready word is the caller's.
///
/// # Errors
/// [`CreateError`], in which case nothing is left behind.
pub fn create(backend: &dyn Backend, segment: &NewSegment, reserve: &Reserve) -> Result<Created, CreateError> {
    let kind = segment.kind;
    // Only the pool: a peer may punch holes into its own segment, and a hole in huge pages is a SIGBUS for its reader.
    let huge = reserve.huge_pages.filter(|_| kind == SegmentKind::Pool);
    let failed = |step| {
        move |source: io::Error| CreateError::System {
            segment: kind,
            step,
            source,
        }
    };
    let descriptor = backend.create(kind, huge).map_err(failed("create"))?;
    let finish = || {
        let memory = reserve::reserve(&descriptor, kind, segment.bytes, reserve)?;
        let size_bytes = memory.size() as u64;
        let boot_id = boot_id().map_err(failed("read the boot id for"))?;
        let (hash, channel, epoch) = (segment.layout_hash, segment.channel, segment.creator_epoch);
        let header = SegmentHeader::new(kind, size_bytes, hash, boot_id, channel, epoch);
        memory.copy_in(0, &header.to_words());
        // X3a
        if !planted("x3a_unsealed") {
            backend.seal(kind, &descriptor).map_err(failed("seal"))?;
        }
        Ok(memory)
    };
    match finish() {
        Ok(memory) => Ok(Created {
            kind,
            descriptor,
            memory,
        }),
        Err(error) => {
            if let Ok(identity) = Identity::of_descriptor(&descriptor) {
                // The first error is the one to report.
                let _ = backend.discard(kind, identity);
            }
            Err(error)
        }
    }
}

/// Why a descriptor that a peer handed over is not used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The descriptor or the header in it does not fit: the peer's fault, or another version of it.
    #[error(transparent)]
    Refused(#[from] SegmentRefused),
    /// The mode does not let this segment be written by a later process.
    #[error(
        "{segment} segment is sealed against new writers (hardened mode): start cold and let the workers re-attach"
    )]
    SealedAgainstWriters {
        /// The segment.
        segment: SegmentKind,
    },
    /// The system refused.
    #[error("cannot {step} the {segment} segment: {source}")]
    System {
        /// The segment.
        segment: SegmentKind,
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// What a process that receives a segment knows about it.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The role that it was handed over for.
    pub kind: SegmentKind,
    /// The channel's mode.
    pub mode: Mode,
    /// The layout hash of this build.
    pub layout_hash: u64,
    /// The channel, once it is known.
    pub channel: Option<ChannelId>,
    /// The process start that must have made it, where that is known.
    pub creator_epoch: Option<ProcessEpoch>,
    /// Users who may have made it.
    pub peers: &'a Peers,
}

/// Checks and maps a peer's segment for reading.
///
/// # Errors
/// [`OpenError`]; nothing is mapped then.
pub fn open_reader(descriptor: &OwnedFd, wanted: &Wanted<'_>) -> Result<Mapping, OpenError> {
    let bytes = check_descriptor(descriptor, wanted)?;
    let mapping = Mapping::read_only(descriptor, bytes).map_err(system(wanted.kind, "map"))?;
    check_header(&mapping, wanted)?;
    if wanted.mode == Mode::Persistent && wanted.kind == SegmentKind::Control {
        // X26: a producer of another runtime folder must see that somebody uses these files.
        hold(descriptor).map_err(system(wanted.kind, "hold"))?;
    }
    Ok(mapping)
}

/// Checks and maps a segment that this process owns from now on, for reading and writing.
///
/// # Errors
/// [`OpenError`]; nothing is mapped then.
pub fn open_writer(descriptor: &OwnedFd, wanted: &Wanted<'_>) -> Result<MappingMut, OpenError> {
    if wanted.mode.seals_writes(wanted.kind) {
        return Err(OpenError::SealedAgainstWriters { segment: wanted.kind });
    }
    let bytes = check_descriptor(descriptor, wanted)?;
    let mapping = MappingMut::writable(descriptor, bytes).map_err(system(wanted.kind, "map"))?;
    check_header(&mapping, wanted)?;
    Ok(mapping)
}

/// A descriptor of the same segment that can only be read: what workers get of control and pool.
///
/// # Errors
/// The system's error.
pub fn reopen_read_only(segment: &OwnedFd) -> io::Result<OwnedFd> {
    reopen(segment, OFlags::RDONLY)
}

/// A descriptor of the same segment that can be written: what a new producer makes of one that a worker hands back.
///
/// # Errors
/// [`OpenError::SealedAgainstWriters`] in hardened mode, else the system's error (another user's segment).
pub fn reopen_writable(segment: &OwnedFd, kind: SegmentKind, mode: Mode) -> Result<OwnedFd, OpenError> {
    if mode.seals_writes(kind) {
        return Err(OpenError::SealedAgainstWriters { segment: kind });
    }
    reopen(segment, OFlags::RDWR).map_err(system(kind, "reopen"))
}

fn reopen(segment: &OwnedFd, access: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", segment.as_raw_fd());
    Ok(rustix::fs::open(path, access | OFlags::CLOEXEC, Bits::empty())?)
}

/// Checks a descriptor before anything of it is mapped (X3a). Returns its size in bytes.
fn check_descriptor(descriptor: &OwnedFd, wanted: &Wanted<'_>) -> Result<usize, OpenError> {
    let refuse = |field, found: String, expected: String, remedy| {
        let segment = wanted.kind;
        Err(OpenError::Refused(SegmentRefused {
            segment,
            field,
            found,
            expected,
            remedy,
        }))
    };
    const FOREIGN: &str = "something else than a kvsluice process of this user handed it over";
    let stat = fstat(descriptor).map_err(|e| system(wanted.kind, "look at")(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return refuse("type", format!("{:o}", stat.st_mode), "a memory file".into(), FOREIGN);
    }
    if !wanted.peers.allows(stat.st_uid) {
        return refuse(
            "owner",
            format!("uid {}", stat.st_uid),
            wanted.peers.to_string(),
            "allow that user: --allow-uid",
        );
    }
    if wanted.mode == Mode::Persistent {
        // A name cannot be sealed; at least it is memory, and closed to others.
        let place = fstatfs(descriptor).map_err(|e| system(wanted.kind, "look at")(e.into()))?;
        if !is_memory(&place) {
            let found = format!("{:#x}", place.f_type);
            return refuse("file system", found, "tmpfs or hugetlbfs".into(), FOREIGN);
        }
        if stat.st_mode & 0o077 != 0 {
            return refuse("mode", format!("{:04o}", stat.st_mode & 0o7777), "0600".into(), FOREIGN);
        }
    } else {
        let needed = wanted.mode.seals(wanted.kind);
        let found = fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
        if !found.contains(needed) {
            return refuse("seals", format!("{found:?}"), format!("{needed:?}"), FOREIGN);
        }
    }
    // X30: pages that were never reserved can be missing at the first touch.
    let (size, reserved) = (stat.st_size, stat.st_blocks.saturating_mul(512));
    if reserved < size {
        return refuse(
            "reserved bytes",
            reserved.to_string(),
            size.to_string(),
            "its maker is not done, or hostile",
        );
    }
    // The header repeats the size, so a short segment is refused there with the others.
    let bytes = usize::try_from(size).unwrap_or(0);
    if bytes < HEADER_BYTES {
        let expected = format!("at least {HEADER_BYTES}");
        return refuse("size", bytes.to_string(), expected, "its maker is not done, or hostile");
    }
    Ok(bytes & !7)
}

fn check_header(memory: &impl Shared, wanted: &Wanted<'_>) -> Result<(), OpenError> {
    // The ready word first, so that everything it vouches for is seen below.
    // pairs with: Created::make_ready.
    let ready = memory.load_acquire(READY_AT);
    let mut words = [0; HEADER_BYTES / 8];
    memory.copy_out(0, &mut words);
    let mut header = SegmentHeader::from_words(&words);
    header.ready = ready.into();
    let expected = Expected {
        kind: wanted.kind,
        size_bytes: memory.size() as u64,
        layout_hash: wanted.layout_hash,
        boot_id: boot_id().map_err(system(wanted.kind, "read the boot id for"))?,
        channel: wanted.channel,
        creator_epoch: wanted.creator_epoch,
    };
    Ok(header.check(&expected)?)
}

fn system(segment: SegmentKind, step: &'static str) -> impl Fn(io::Error) -> OpenError {
    move |source| OpenError::System { segment, step, source }
}

/// The identity of this boot of the kernel (X26).
///
/// # Errors
/// The system's error, where `/proc` is not there; `InvalidData` where it is not what Linux shows.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    let id = id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel's boot id is no UUID"))?;
    Ok(id.to_be_bytes())
}

#[cfg(test)]
mod tests;
