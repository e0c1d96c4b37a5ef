//! Named segments, which survive both sides (X21, X26): for peers of one user that trust each other.
//!
//! A name cannot be sealed, so any process of the user can truncate or write what it can open.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use kvsluice_layout::segment::SegmentKind;
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode as Bits, OFlags, StatFs, fchmod, flock, fstat, fstatfs, openat,
    statat, unlinkat,
};
use rustix::io::Errno;

use super::{Backend, HugePages, Identity, Mode};
use crate::names::ChannelName;
use crate::peers::own_uid;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The back end *persistent*: files `<channel>.<segment>` in one folder.
#[derive(Debug)]
pub struct Persistent {
    folder: OwnedFd,
    path: PathBuf,
    channel: ChannelName,
}

/// A folder or a file of the persistent mode that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    /// The folder lies on a disk, whose pages a device cannot hold for long.
    #[error("{path} is on file system {found:#x}, expected tmpfs or hugetlbfs; give --persist a folder below /dev/shm")]
    FileSystem {
        /// The folder.
        path: PathBuf,
        /// Its file system's magic number.
        found: u64,
    },
    /// Someone else could put files in, or it is not what it should be.
    #[error("{path}: {field} is {found}, expected {expected}; {remedy}")]
    Unsafe {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it must be.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Another process has the segments mapped (X26).
    #[error(
        "{path} is in use by another process, perhaps one of another runtime folder; stop it first (`fuser {path}`)"
    )]
    InUse {
        /// The control segment's file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{path}: {source}")]
    System {
        /// The folder or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Persistent {
    /// The segments of `channel` in `folder`, which must exist.
    ///
    /// # Errors
    /// [`PersistError`] where the folder is on a disk, is a link, belongs to another user, or lets others write without
    /// the sticky bit.
    pub fn open(folder: &Path, channel: ChannelName) -> Result<Self, PersistError> {
        let system = |source: Errno| PersistError::System {
            path: folder.to_owned(),
            source: source.into(),
        };
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let descriptor = openat(CWD, folder, flags, Bits::empty()).map_err(system)?;
        let found = magic(&fstatfs(&descriptor).map_err(system)?);
        if found != TMPFS_MAGIC && found != HUGETLBFS_MAGIC {
            return Err(PersistError::FileSystem {
                path: folder.to_owned(),
                found,
            });
        }
        let unsafe_folder = |field, found: String, expected: String, remedy| PersistError::Unsafe {
            path: folder.to_owned(),
            field,
            found,
            expected,
            remedy,
        };
        let stat = fstat(&descriptor).map_err(system)?;
        if stat.st_uid != own_uid() && stat.st_uid != 0 {
            let expected = format!("uid {} or root", own_uid());
            return Err(unsafe_folder(
                "owner",
                format!("uid {}", stat.st_uid),
                expected,
                "give --persist your own folder",
            ));
        }
        if stat.st_mode & 0o022 != 0 && stat.st_mode & 0o1000 == 0 {
            let found = format!("{:o}", stat.st_mode & 0o7777);
            return Err(unsafe_folder(
                "mode",
                found,
                "0700 or sticky".into(),
                "chmod 0700 the folder",
            ));
        }
        Ok(Self {
            folder: descriptor,
            path: folder.to_owned(),
            channel,
        })
    }

    /// The file of a segment that an earlier producer left, opened for reading and writing, or `None`.
    ///
    /// # Errors
    /// [`PersistError`] where the name is a link, not a plain file, another user's, open to others, or has more names.
    pub fn find(&self, segment: SegmentKind) -> Result<Option<OwnedFd>, PersistError> {
        let path = self.path_of(segment);
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.folder, self.name(segment), flags, Bits::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => {
                return Err(PersistError::Unsafe {
                    path,
                    field: "type",
                    found: "a link".into(),
                    expected: "a plain file".into(),
                    remedy: "remove it",
                });
            }
            Err(source) => {
                return Err(PersistError::System {
                    path,
                    source: source.into(),
                });
            }
            Ok(file) => file,
        };
        let stat = fstat(&file).map_err(|source| PersistError::System {
            path: path.clone(),
            source: source.into(),
        })?;
        let plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let checks = [
            ("type", plain, "something else".into(), "a plain file".into()),
            (
                "owner",
                stat.st_uid == own_uid(),
                format!("uid {}", stat.st_uid),
                format!("uid {}", own_uid()),
            ),
            (
                "mode",
                stat.st_mode & 0o7777 == 0o600,
                format!("{:04o}", stat.st_mode & 0o7777),
                "0600".into(),
            ),
            (
                "number of names",
                stat.st_nlink == 1,
                stat.st_nlink.to_string(),
                "1".into(),
            ),
        ];
        for (field, fine, found, expected) in checks {
            if !fine {
                return Err(PersistError::Unsafe {
                    path,
                    field,
                    found,
                    expected,
                    remedy: "remove it",
                });
            }
        }
        Ok(Some(file))
    }

    /// Makes sure that nobody holds the channel's segments, and holds them from now on (X26). `control` is the control
    /// segment as [`Self::find`] gave it; the hold lasts until it and its copies are closed.
    ///
    /// The role locks say the same, as long as everybody uses one runtime folder and it is not deleted.
    ///
    /// # Errors
    /// [`PersistError::InUse`].
    pub fn claim(&self, control: &OwnedFd) -> Result<(), PersistError> {
        let path = || self.path_of(SegmentKind::Control);
        match flock(control, FlockOperation::NonBlockingLockExclusive).map(|()| hold(control)) {
            Ok(held) => held.map_err(|source| PersistError::System { path: path(), source }),
            Err(Errno::WOULDBLOCK) => Err(PersistError::InUse { path: path() }),
            Err(source) => Err(PersistError::System {
                path: path(),
                source: source.into(),
            }),
        }
    }

    /// Where the file of a segment lies.
    pub fn path_of(&self, segment: SegmentKind) -> PathBuf {
        self.path.join(self.name(segment))
    }

    fn name(&self, segment: SegmentKind) -> String {
        format!("{}.{segment}", self.channel)
    }
}

impl Backend for Persistent {
    fn mode(&self) -> Mode {
        Mode::Persistent
    }

    /// Huge pages come from the folder's file system, not from here.
    fn create(&self, segment: SegmentKind, _huge: Option<HugePages>) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDWR;
        let file = openat(&self.folder, self.name(segment), flags, Bits::RUSR | Bits::WUSR)?;
        // The process's umask may have taken bits away.
        fchmod(&file, Bits::RUSR | Bits::WUSR)?;
        Ok(file)
    }

    /// A name cannot be sealed; but it can be seen to be in use.
    fn seal(&self, segment: SegmentKind, descriptor: &OwnedFd) -> io::Result<()> {
        if segment == SegmentKind::Control {
            hold(descriptor)
        } else {
            Ok(())
        }
    }

    /// Removes the name if it still means the same file (field 7: a late shutdown unlinked the new generation's).
    ///
    /// The caller holds `producer.lock`, so nobody puts another file there between the look and the removal.
    fn discard(&self, segment: SegmentKind, identity: Identity) -> io::Result<()> {
        let name = self.name(segment);
        match statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(stat) if Identity::of(&stat) != identity => Ok(()),
            Ok(_) => Ok(unlinkat(&self.folder, &name, AtFlags::empty())?),
        }
    }
}

/// Says that this process uses a named segment, until the descriptor and its copies are closed.
///
/// # Errors
/// `WouldBlock` while another process claims it.
pub fn hold(control: &OwnedFd) -> io::Result<()> {
    Ok(flock(control, FlockOperation::NonBlockingLockShared)?)
}

/// True for a file whose pages are huge ones.
pub(super) fn is_hugetlbfs(stat: &StatFs) -> bool {
    magic(stat) == HUGETLBFS_MAGIC
}

/// True for a file system whose pages a device may hold for long.
pub(crate) fn is_memory(stat: &StatFs) -> bool {
    is_hugetlbfs(stat) || magic(stat) == TMPFS_MAGIC
}

fn magic(stat: &StatFs) -> u64 {
    // The field's type differs between architectures; the magic numbers have 32 bits.
    stat.f_type as u64 & 0xffff_ffff
}
