//! What dead processes left behind: found and removed, never what is alive, never what is new under an old name (X27).
//!
//! A channel is stale when every one of its roles can be locked. It stays locked while its files are removed, so nobody
//! can start in between; and each file is removed only if it is the one that was looked at.

use std::path::PathBuf;
use std::time::Duration;

use kvsluice_layout::ids::{MAX_RANKS, ProcessEpoch, Rank};
use kvsluice_layout::segment::SegmentKind;

use crate::lock::{Holder, LockError, LockWatch, RoleLock};
use crate::names::{ChannelName, Role};
use crate::runtime_dir::{ChannelDir, RuntimeDir, RuntimeDirError};
use crate::segment::{Backend, Identity, PersistError, Persistent};

/// A channel of the runtime folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: ChannelName,
    /// Its roles that have a lock or a socket, with the process that fills each; `None` where nobody does.
    pub roles: Vec<(Role, Option<Holder>)>,
}

impl Found {
    /// True where some process takes part in it.
    pub fn is_live(&self) -> bool {
        self.roles.iter().any(|(_, holder)| holder.is_some())
    }
}

/// What came of cleaning a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cleaned {
    /// It is alive: nothing was touched.
    Live {
        /// One of its processes.
        role: Role,
        /// That process.
        holder: Holder,
    },
    /// It was stale.
    Removed {
        /// What was removed.
        paths: Vec<PathBuf>,
        /// False where the channel's folder stays, because something else lies in it or came into it.
        folder_removed: bool,
    },
}

/// Why a channel could not be cleaned.
#[derive(Debug, thiserror::Error)]
pub enum CleanError {
    /// Its folder or a file in it cannot be used.
    #[error(transparent)]
    Folder(#[from] RuntimeDirError),
    /// One of its locks cannot be taken, though nobody holds it.
    #[error(transparent)]
    Lock(LockError),
    /// One of its named segments cannot be used.
    #[error(transparent)]
    Segment(#[from] PersistError),
    /// The system refused.
    #[error("cannot remove {path}: {source}")]
    Remove {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Every channel of a runtime folder, with who takes part in it.
///
/// # Errors
/// [`CleanError::Folder`] where the folder cannot be read. A channel that is another user's is passed over.
pub fn list(runtime: &RuntimeDir) -> Result<Vec<Found>, CleanError> {
    let mut all = Vec::new();
    for name in runtime.channels()? {
        match look(runtime, &name) {
            Ok(found) => all.push(found),
            Err(error) => tracing::warn!(channel = %name, %error, "this channel is passed over"),
        }
    }
    Ok(all)
}

fn look(runtime: &RuntimeDir, name: &ChannelName) -> Result<Found, CleanError> {
    look_in(&runtime.existing(name)?)
}

fn look_in(dir: &ChannelDir) -> Result<Found, CleanError> {
    let mut roles = dir.roles("lock")?;
    roles.extend(dir.roles("sock")?);
    roles.sort_unstable();
    roles.dedup();
    let holder = |role: Role| -> Result<(Role, Option<Holder>), CleanError> {
        let watch = LockWatch::open(dir, role, None)?;
        let holder = watch
            .map(|watch| watch.holder())
            .transpose()
            .map_err(|source| RuntimeDirError::System {
                path: dir.path_of(&role.lock_file()),
                step: "ask for the lock of",
                source,
            })?;
        Ok((role, holder.flatten()))
    };
    let roles = roles.into_iter().map(holder).collect::<Result<_, _>>()?;
    Ok(Found {
        name: dir.name().clone(),
        roles,
    })
}

/// Removes what a stale channel left in the runtime folder and, if given, its named segments. `epoch` stands in the locks
/// meanwhile.
///
/// # Errors
/// [`CleanError`]; what was removed before it stays removed.
pub fn clean(
    runtime: &RuntimeDir,
    name: &ChannelName,
    named: Option<&Persistent>,
    epoch: ProcessEpoch,
) -> Result<Cleaned, CleanError> {
    let dir = match runtime.existing(name) {
        // The named segments may be all that is left: the folder is made once more, so that nobody can start meanwhile.
        Err(error) if error.is_not_found() && named.map_or(Ok(false), any_named)? => runtime.channel(name)?,
        dir => dir?,
    };
    let found = look_in(&dir)?;
    if let Some((role, Some(holder))) = found.roles.iter().find(|(_, holder)| holder.is_some()) {
        return Ok(Cleaned::Live {
            role: *role,
            holder: *holder,
        });
    }
    let left = dir.roles("lock")?;
    // The producer's role even if it left nothing: nobody may start one now.
    let roles = found
        .roles
        .iter()
        .map(|(role, _)| *role)
        .filter(|role| *role != Role::Producer);
    let mut locks = Vec::new();
    for role in std::iter::once(Role::Producer).chain(roles) {
        match RoleLock::acquire(&dir, role, epoch, Duration::ZERO) {
            Ok(lock) => locks.push(lock),
            // Somebody was faster. What is locked here already goes with its lock files, which nobody used.
            Err(LockError::Held { role, holder, .. }) => return Ok(Cleaned::Live { role, holder }),
            Err(error) => return Err(CleanError::Lock(error)),
        }
    }
    let mut paths = Vec::new();
    if let Some(named) = named {
        remove_named(named, &mut paths)?;
    }
    for lock in &locks {
        let file = lock.role().socket_file();
        let path = dir.path_of(&file);
        let removed = dir.identity_of(&file).and_then(|identity| match identity {
            Some(identity) => dir.remove_file(&file, identity),
            None => Ok(false),
        });
        match removed {
            Ok(true) => paths.push(path),
            Ok(false) => {}
            Err(source) => return Err(CleanError::Remove { path, source }),
        }
    }
    // Each lock file goes with its lock; those that were made here for the while are not worth a word.
    let locked = locks.into_iter().map(|lock| lock.role());
    let found = locked.filter(|role| left.contains(role));
    paths.extend(found.map(|role| dir.path_of(&role.lock_file())));
    let folder = dir.path_of("");
    let folder_removed = runtime.remove(&dir).map_err(|source| CleanError::Remove {
        path: folder.clone(),
        source,
    })?;
    Ok(Cleaned::Removed { paths, folder_removed })
}

/// Every segment that a channel may have, the control segment last.
fn segments() -> impl Iterator<Item = SegmentKind> {
    let ranks = (0..MAX_RANKS).map(|rank| SegmentKind::Rank(Rank(rank)));
    std::iter::once(SegmentKind::Pool)
        .chain(ranks)
        .chain([SegmentKind::Control])
}

fn any_named(named: &Persistent) -> Result<bool, CleanError> {
    for segment in segments() {
        if named.find(segment)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn remove_named(named: &Persistent, paths: &mut Vec<PathBuf>) -> Result<(), CleanError> {
    // Held until all are gone: the claim lasts as long as the descriptor.
    let control = named.find(SegmentKind::Control)?;
    if let Some(control) = &control {
        named.claim(control)?;
    }
    for segment in segments() {
        let Some(file) = named.find(segment)? else { continue };
        let path = named.path_of(segment);
        let removed = Identity::of_descriptor(&file).and_then(|identity| named.discard(segment, identity));
        removed.map_err(|source| CleanError::Remove {
            path: path.clone(),
            source,
        })?;
        paths.push(path);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::*;
    use crate::link::{Link, Listener};
    use crate::peers::Peers;
    use crate::test_process::{Second, listen, part, say};

    const EPOCH: ProcessEpoch = ProcessEpoch(5);

    fn runtime(folder: &Path) -> RuntimeDir {
        RuntimeDir::open(&folder.join("run"), &Peers::default()).unwrap()
    }

    fn name() -> ChannelName {
        ChannelName::new("engine").unwrap()
    }

    /// The second process: fills two roles and waits to be killed.
    fn live(folder: &str) {
        let dir = runtime(folder.as_ref()).channel(&name()).unwrap();
        let roles = [Role::Producer, Role::Rank(Rank(3))];
        let locks = roles.map(|role| RoleLock::acquire(&dir, role, ProcessEpoch(7), Duration::ZERO).unwrap());
        let _listeners = locks.each_ref().map(|lock| Listener::bind(lock).unwrap());
        say("live");
        listen();
    }

    #[test]
    fn x27_field_6_after_sigkill_everything_is_found_and_removed_and_a_live_channel_is_not_touched() {
        if let Some(folder) = part() {
            return live(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let runtime = runtime(temp.path());
        let mut second = Second::start(temp.path().to_str().unwrap());
        assert_eq!(second.hear(), "live");
        let found = list(&runtime).unwrap();
        assert!(found.len() == 1 && found[0].is_live(), "{found:?}");
        assert_eq!(found[0].roles[0].1.unwrap().pid, Some(second.pid()));
        let Cleaned::Live { role, holder } = clean(&runtime, &name(), None, EPOCH).unwrap() else {
            panic!("a live channel was cleaned")
        };
        assert_eq!((role, holder.pid), (Role::Producer, Some(second.pid())));
        let dir = runtime.existing(&name()).unwrap();
        Link::connect(&dir, Role::Rank(Rank(3))).unwrap();

        second.kill();
        let found = list(&runtime).unwrap();
        assert_eq!(found[0].roles, [(Role::Producer, None), (Role::Rank(Rank(3)), None)]);
        let Cleaned::Removed {
            mut paths,
            folder_removed,
        } = clean(&runtime, &name(), None, EPOCH).unwrap()
        else {
            panic!("a stale channel was taken for a live one")
        };
        paths.sort();
        let files = ["producer.lock", "producer.sock", "rank-3.lock", "rank-3.sock"];
        assert_eq!(paths, files.map(|file| dir.path_of(file)));
        assert!(folder_removed && list(&runtime).unwrap().is_empty());
    }

    #[test]
    fn x27_what_is_not_a_channels_file_is_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = runtime(temp.path());
        let dir = runtime.channel(&name()).unwrap();
        drop(UnixListener::bind(dir.path_of("rank-0.sock")).unwrap());
        std::fs::write(dir.path_of("notes"), "mine").unwrap();
        let Cleaned::Removed { paths, folder_removed } = clean(&runtime, &name(), None, EPOCH).unwrap() else {
            panic!("a stale channel was taken for a live one")
        };
        assert!(paths.contains(&dir.path_of("rank-0.sock")) && !folder_removed);
        assert_eq!(std::fs::read_to_string(dir.path_of("notes")).unwrap(), "mine");
        // A channel that is not there cannot be cleaned.
        let other = ChannelName::new("other").unwrap();
        assert!(
            clean(&runtime, &other, None, EPOCH)
                .unwrap_err()
                .to_string()
                .contains("No such file")
        );
    }

    #[test]
    fn x26_x27_named_segments_are_removed_unless_somebody_holds_them() {
        use kvsluice_layout::ids::ChannelId;

        use crate::segment::{NewSegment, Reserve, create};

        let temp = tempfile::tempdir().unwrap();
        let runtime = runtime(temp.path());
        runtime.channel(&name()).unwrap();
        let folder = tempfile::Builder::new()
            .prefix("kvsluice-test")
            .tempdir_in("/dev/shm")
            .unwrap();
        let named = Persistent::open(folder.path(), name()).unwrap();
        for kind in [SegmentKind::Control, SegmentKind::Pool, SegmentKind::Rank(Rank(63))] {
            let (layout_hash, channel, creator_epoch) = (1, ChannelId(1), ProcessEpoch(1));
            let segment = NewSegment {
                kind,
                bytes: 4096,
                layout_hash,
                channel,
                creator_epoch,
            };
            create(&named, &segment, &Reserve::default()).unwrap();
        }
        // A process of another runtime folder holds them.
        let held = named.find(SegmentKind::Control).unwrap().unwrap();
        crate::segment::hold(&held).unwrap();
        let said = clean(&runtime, &name(), Some(&named), EPOCH).unwrap_err().to_string();
        assert!(said.contains("engine.control is in use by another process"), "{said}");
        assert_eq!(folder.path().read_dir().unwrap().count(), 3);
        drop(held);
        // Again and again: another test's process may hold a copy of the descriptor until its exec.
        let mut attempts = std::iter::repeat_with(|| clean(&runtime, &name(), Some(&named), EPOCH));
        let Some(Ok(Cleaned::Removed { paths, .. })) = attempts.find(Result::is_ok) else {
            panic!("a stale channel was taken for a live one")
        };
        assert!(paths.contains(&folder.path().join("engine.rank-63")));
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn x26_x27_named_segments_are_removed_when_nothing_else_of_their_channel_is_left() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = runtime(temp.path());
        let folder = tempfile::Builder::new()
            .prefix("kvsluice-test")
            .tempdir_in("/dev/shm")
            .unwrap();
        let named = Persistent::open(folder.path(), name()).unwrap();
        let said = clean(&runtime, &name(), Some(&named), EPOCH).unwrap_err().to_string();
        assert!(said.contains("No such file"), "{said}");
        drop(named.create(SegmentKind::Pool, None).unwrap());
        let Cleaned::Removed { paths, folder_removed } = clean(&runtime, &name(), Some(&named), EPOCH).unwrap() else {
            panic!("a stale channel was taken for a live one")
        };
        assert_eq!(paths, [folder.path().join("engine.pool")]);
        assert!(folder_removed && list(&runtime).unwrap().is_empty());
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}
