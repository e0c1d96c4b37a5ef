//! Where a channel's locks and sockets lie (X21).
//!
//! ```text
//! <runtime>/<channel>/producer.lock   held by the producer for as long as it lives
//! <runtime>/<channel>/producer.sock   where workers attach
//! <runtime>/<channel>/rank-R.lock     held by the worker of rank R
//! <runtime>/<channel>/rank-R.sock     where a new producer finds that worker
//! ```
//!
//! Everything is opened relative to a folder's descriptor, without following links, and checked by owner, mode, device
//! and inode. So a folder that is swapped for another one under a running process changes nothing for it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fchmod, fstat, mkdirat, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::names::{ChannelName, Role};
use crate::peers::{Peers, own_uid};
use crate::segment::Identity;

/// A folder or a file of a channel that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// It is not what it must be: another user may have put it there.
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
    /// The channel's folder was deleted or replaced under a running process (X27).
    #[error(
        "{path} was deleted or replaced while the channel was in use; nobody can attach any more: restart both sides"
    )]
    Gone {
        /// The folder as it was called.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {step} {path}: {source}")]
    System {
        /// The folder or file.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl RuntimeDirError {
    /// True where there is no such folder or file.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::System { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

fn system(path: &Path, step: &'static str) -> impl Fn(Errno) -> RuntimeDirError {
    move |source| RuntimeDirError::System {
        path: path.to_owned(),
        step,
        source: source.into(),
    }
}

/// The folder that holds one folder per channel.
#[derive(Debug)]
pub struct RuntimeDir {
    folder: OwnedFd,
    path: PathBuf,
    peers: Peers,
}

impl RuntimeDir {
    /// The folder to use: the one asked for, else `$XDG_RUNTIME_DIR/kvsluice`, else one of the user's own below the
    /// folder for temporary files.
    pub fn choose(asked: Option<&Path>) -> PathBuf {
        let of_session = || {
            let folder = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
            folder.is_absolute().then(|| folder.join("kvsluice"))
        };
        let of_user = || std::env::temp_dir().join(format!("kvsluice-{}", own_uid()));
        asked.map(Path::to_owned).or_else(of_session).unwrap_or_else(of_user)
    }

    /// Opens the folder, and makes it if it is not there: closed to other users, unless `peers` names some.
    ///
    /// # Errors
    /// [`RuntimeDirError`] where it is a link, is not a peer's or root's, or others may write in it without its sticky bit.
    pub fn open(path: &Path, peers: &Peers) -> Result<Self, RuntimeDirError> {
        let folder = open_folder(CWD, path.as_os_str(), path, Some(folder_mode(peers)))?;
        let stat = fstat(&folder).map_err(system(path, "look at"))?;
        check_owner(path, stat.st_uid, stat.st_uid == 0 || peers.allows(stat.st_uid), peers)?;
        if stat.st_mode & 0o022 != 0 && stat.st_mode & 0o1000 == 0 {
            return Err(RuntimeDirError::Unsafe {
                path: path.to_owned(),
                field: "mode",
                found: format!("{:04o}", stat.st_mode & 0o7777),
                expected: "no writing by others, or sticky".into(),
                remedy: "chmod 0700 it or give --runtime-dir",
            });
        }
        Ok(Self {
            folder,
            path: path.to_owned(),
            peers: peers.clone(),
        })
    }

    /// The folder of a channel, made if it is not there.
    ///
    /// # Errors
    /// [`RuntimeDirError`] where it is a link, is not a peer's, or is open to more users than the peers.
    pub fn channel(&self, name: &ChannelName) -> Result<ChannelDir, RuntimeDirError> {
        self.open_channel(name, Some(folder_mode(&self.peers)))
    }

    /// The folder of a channel that must be there already.
    ///
    /// # Errors
    /// As [`Self::channel`]; the system's `NotFound` where there is no such channel.
    pub fn existing(&self, name: &ChannelName) -> Result<ChannelDir, RuntimeDirError> {
        self.open_channel(name, None)
    }

    fn open_channel(&self, name: &ChannelName, make: Option<Mode>) -> Result<ChannelDir, RuntimeDirError> {
        let path = self.path.join(name.as_str());
        let folder = open_folder(self.folder.as_fd(), name.as_str().as_ref(), &path, make)?;
        let stat = fstat(&folder).map_err(system(&path, "look at"))?;
        check_owner(&path, stat.st_uid, self.peers.allows(stat.st_uid), &self.peers)?;
        let expected = folder_mode(&self.peers).as_raw_mode();
        if stat.st_mode & 0o7777 & !expected != 0 {
            return Err(RuntimeDirError::Unsafe {
                path,
                field: "mode",
                found: format!("{:04o}", stat.st_mode & 0o7777),
                expected: format!("{expected:04o}"),
                remedy: "stop the channel, remove the folder and start again",
            });
        }
        Ok(ChannelDir {
            inner: Arc::new(Inner {
                identity: Identity::of(&stat),
                folder,
                path,
                name: name.clone(),
                peers: self.peers.clone(),
            }),
        })
    }

    /// Names of the channels that have a folder here, sorted. Anything else is passed over.
    ///
    /// # Errors
    /// The system's error.
    pub fn channels(&self) -> Result<Vec<ChannelName>, RuntimeDirError> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.folder).map_err(system(&self.path, "list"))? {
            let entry = entry.map_err(system(&self.path, "list"))?;
            names.extend(
                entry
                    .file_name()
                    .to_str()
                    .ok()
                    .and_then(|name| ChannelName::new(name).ok()),
            );
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes a channel's folder if it is empty and still the one that `channel` means.
    pub(crate) fn remove(&self, channel: &ChannelDir) -> io::Result<bool> {
        let name = channel.name().as_str();
        match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if Identity::of(&stat) == channel.inner.identity => {}
            Ok(_) | Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        match unlinkat(&self.folder, name, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The folder of one channel. Clones share one descriptor.
#[derive(Clone, Debug)]
pub struct ChannelDir {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    folder: OwnedFd,
    path: PathBuf,
    name: ChannelName,
    identity: Identity,
    peers: Peers,
}

impl ChannelDir {
    /// The channel's name.
    pub fn name(&self) -> &ChannelName {
        &self.inner.name
    }

    /// Users whose processes may take part.
    pub fn peers(&self) -> &Peers {
        &self.inner.peers
    }

    /// Where a file of the channel lies, for messages.
    pub fn path_of(&self, file: &str) -> PathBuf {
        self.inner.path.join(file)
    }

    /// A short path of a file of the channel: a socket's name has at most 107 bytes, the folder's may have more (X21).
    pub(crate) fn short_path(&self, file: &str) -> String {
        format!("/proc/self/fd/{}/{file}", self.inner.folder.as_raw_fd())
    }

    /// Checks that the folder is still to be found under its name.
    ///
    /// # Errors
    /// [`RuntimeDirError::Gone`] where it was deleted or replaced (X27).
    pub fn check_still_there(&self) -> Result<(), RuntimeDirError> {
        match statat(CWD, &self.inner.path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if Identity::of(&stat) == self.inner.identity => Ok(()),
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => Err(RuntimeDirError::Gone {
                path: self.inner.path.clone(),
            }),
            Err(error) => Err(system(&self.inner.path, "look at")(error)),
        }
    }

    /// Roles that have a file of that ending ("lock", "sock") here, sorted.
    ///
    /// # Errors
    /// The system's error.
    pub fn roles(&self, ending: &str) -> Result<Vec<Role>, RuntimeDirError> {
        let mut roles = Vec::new();
        for entry in Dir::read_from(&self.inner.folder).map_err(system(&self.inner.path, "list"))? {
            let entry = entry.map_err(system(&self.inner.path, "list"))?;
            let role = entry.file_name().to_str().ok().and_then(Role::of_file);
            roles.extend(role.filter(|(_, found)| *found == ending).map(|(role, _)| role));
        }
        roles.sort_unstable();
        Ok(roles)
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.folder.as_fd()
    }

    /// Opens a plain file of the channel; `make` creates it if it is not there.
    pub(crate) fn open_file(&self, file: &str, make: bool) -> Result<OwnedFd, RuntimeDirError> {
        let path = self.path_of(file);
        // Other users, where they are peers, may look at a lock but not take it.
        let mode = if self.inner.peers.shared() {
            Mode::from_raw_mode(0o644)
        } else {
            Mode::from_raw_mode(0o600)
        };
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let descriptor = self.descriptor();
        let opened = if make {
            // Exclusively first, so that only a file made here gets its mode set.
            match openat(
                descriptor,
                file,
                flags | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
                mode,
            ) {
                Ok(made) => fchmod(&made, mode).map(|()| made),
                Err(Errno::EXIST) => openat(descriptor, file, flags | OFlags::RDWR, Mode::empty()),
                Err(error) => Err(error),
            }
        } else {
            openat(descriptor, file, flags | OFlags::RDONLY, Mode::empty())
        };
        let refuse = |field, found: String, expected: String| RuntimeDirError::Unsafe {
            path: path.clone(),
            field,
            found,
            expected,
            remedy: "stop the channel and remove it",
        };
        let opened = opened.map_err(|error| match error {
            Errno::LOOP => refuse("type", "a link".into(), "a plain file".into()),
            error => system(&path, "open")(error),
        })?;
        let stat = fstat(&opened).map_err(system(&path, "look at"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refuse("type", format!("{:o}", stat.st_mode), "a plain file".into()));
        }
        check_owner(
            &path,
            stat.st_uid,
            self.inner.peers.allows(stat.st_uid),
            &self.inner.peers,
        )?;
        if stat.st_mode & 0o7777 & !mode.as_raw_mode() != 0 {
            let found = format!("{:04o}", stat.st_mode & 0o7777);
            return Err(refuse("mode", found, format!("{:04o}", mode.as_raw_mode())));
        }
        Ok(opened)
    }

    /// The file that a name of the channel means now, or `None`.
    pub(crate) fn identity_of(&self, file: &str) -> io::Result<Option<Identity>> {
        match statat(self.descriptor(), file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(Identity::of(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a name of the channel if it means the file `identity` (field 7). The caller holds the lock of the role
    /// that the file belongs to, so nobody puts another one there in between.
    pub(crate) fn remove_file(&self, file: &str, identity: Identity) -> io::Result<bool> {
        if self.identity_of(file)? != Some(identity) {
            return Ok(false);
        }
        match unlinkat(self.descriptor(), file, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Folders are the user's alone; where other users are peers, everybody may enter and nobody may remove what is
/// another's.
fn folder_mode(peers: &Peers) -> Mode {
    Mode::from_raw_mode(if peers.shared() { 0o1777 } else { 0o700 })
}

fn check_owner(path: &Path, uid: u32, allowed: bool, peers: &Peers) -> Result<(), RuntimeDirError> {
    if allowed {
        return Ok(());
    }
    Err(RuntimeDirError::Unsafe {
        path: path.to_owned(),
        field: "owner",
        found: format!("uid {uid}"),
        expected: peers.to_string(),
        remedy: "give --runtime-dir a folder of your own, or allow that user: --allow-uid",
    })
}

/// Opens a folder without following a link in its last part; with a mode, makes it first if it is not there.
fn open_folder(
    at: BorrowedFd<'_>,
    name: &std::ffi::OsStr,
    path: &Path,
    make: Option<Mode>,
) -> Result<OwnedFd, RuntimeDirError> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let made = match make.map(|mode| mkdirat(at, name, mode)) {
        Some(Ok(())) => true,
        None | Some(Err(Errno::EXIST)) => false,
        Some(Err(error)) => return Err(system(path, "make")(error)),
    };
    let folder = match openat(at, name, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(RuntimeDirError::Unsafe {
                path: path.to_owned(),
                field: "type",
                found: "a link or a file".into(),
                expected: "a folder".into(),
                remedy: "remove it or give --runtime-dir",
            });
        }
        folder => folder.map_err(system(path, "open"))?,
    };
    // The process's umask may have taken bits away.
    if let Some(mode) = make.filter(|_| made) {
        fchmod(&folder, mode).map_err(system(path, "set the mode of"))?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use kvsluice_layout::ids::Rank;

    use super::*;

    fn name() -> ChannelName {
        ChannelName::new("engine").unwrap()
    }

    #[test]
    fn x21_the_runtime_folder_is_the_one_asked_for_or_the_users_own() {
        assert_eq!(RuntimeDir::choose(Some(Path::new("/a/b"))), Path::new("/a/b"));
        let default = RuntimeDir::choose(None);
        let of_session = std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|folder| default.starts_with(folder));
        assert!(
            of_session || default == std::env::temp_dir().join(format!("kvsluice-{}", own_uid())),
            "{default:?}"
        );
    }

    #[test]
    fn x21_folders_are_made_for_the_user_alone_and_refused_when_others_may_write() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        let runtime = RuntimeDir::open(&path, &Peers::default()).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o700);
        assert!(runtime.existing(&name()).is_err());
        let channel = runtime.channel(&name()).unwrap();
        assert_eq!(channel.path_of("x"), path.join("engine/x"));
        assert_eq!(path.join("engine").metadata().unwrap().mode() & 0o7777, 0o700);
        runtime.existing(&name()).unwrap();

        std::fs::set_permissions(path.join("engine"), PermissionsExt::from_mode(0o750)).unwrap();
        let said = runtime.channel(&name()).unwrap_err().to_string();
        assert!(said.contains("mode is 0750, expected 0700"), "{said}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o770)).unwrap();
        let said = RuntimeDir::open(&path, &Peers::default()).unwrap_err().to_string();
        assert!(
            said.contains("mode is 0770, expected no writing by others, or sticky; chmod 0700"),
            "{said}"
        );

        let link = temp.path().join("link");
        symlink(&path, &link).unwrap();
        let said = RuntimeDir::open(&link, &Peers::default()).unwrap_err().to_string();
        assert!(said.contains("type is a link or a file, expected a folder"), "{said}");
    }

    #[test]
    fn x21_a_folder_of_another_user_is_refused_unless_that_user_is_allowed() {
        if own_uid() != 0 {
            return eprintln!("only root can give a folder to another user");
        }
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        std::fs::create_dir(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(4711), None).unwrap();
        let said = RuntimeDir::open(&path, &Peers::default()).unwrap_err().to_string();
        assert!(said.contains("owner is uid 4711, expected uid 0"), "{said}");
        let runtime = RuntimeDir::open(&path, &Peers::with([4711])).unwrap();
        let channel = runtime.channel(&name()).unwrap();
        // Shared among users: sticky, so that nobody removes another's files.
        assert_eq!(path.join("engine").metadata().unwrap().mode() & 0o7777, 0o1777);
        let lock = channel.open_file("producer.lock", true).unwrap();
        assert_eq!(fstat(&lock).unwrap().st_mode & 0o7777, 0o644);
    }

    #[test]
    fn x21_a_file_is_made_0600_and_never_opened_through_a_link() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("run"), &Peers::default()).unwrap();
        let channel = runtime.channel(&name()).unwrap();
        assert!(channel.open_file("producer.lock", false).is_err());
        let made = channel.open_file("producer.lock", true).unwrap();
        assert_eq!(fstat(&made).unwrap().st_mode & 0o7777, 0o600);
        let identity = Identity::of_descriptor(&made).unwrap();
        assert_eq!(channel.identity_of("producer.lock").unwrap(), Some(identity));

        symlink(temp.path().join("elsewhere"), channel.path_of("rank-0.lock")).unwrap();
        let said = channel.open_file("rank-0.lock", true).unwrap_err().to_string();
        assert!(
            said.contains("rank-0.lock: type is a link, expected a plain file"),
            "{said}"
        );
        rustix::fs::mknodat(
            CWD,
            channel.path_of("rank-1.lock"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let said = channel.open_file("rank-1.lock", true).unwrap_err().to_string();
        assert!(said.contains("expected a plain file"), "{said}");
        std::fs::set_permissions(channel.path_of("producer.lock"), PermissionsExt::from_mode(0o666)).unwrap();
        let said = channel.open_file("producer.lock", false).unwrap_err().to_string();
        assert!(said.contains("mode is 0666, expected 0600"), "{said}");
        assert_eq!(
            channel.roles("lock").unwrap(),
            [Role::Producer, Role::Rank(Rank(0)), Role::Rank(Rank(1))]
        );
    }

    #[test]
    fn x27_a_runtime_folder_deleted_under_a_live_channel_is_noticed() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("run"), &Peers::default()).unwrap();
        let channel = runtime.channel(&name()).unwrap();
        channel.check_still_there().unwrap();
        std::fs::remove_dir(channel.path_of("")).unwrap();
        let said = channel.check_still_there().unwrap_err().to_string();
        assert!(
            said.contains("engine was deleted or replaced while the channel was in use"),
            "{said}"
        );
        // The same name again is not the same folder, and not ours to remove.
        let second = runtime.channel(&name()).unwrap();
        assert!(channel.check_still_there().is_err());
        assert!(!runtime.remove(&channel).unwrap());
        assert!(runtime.remove(&second).unwrap());
    }
}
