//! Who fills a role: a record lock on the role's file, which the kernel releases when the process ends (X20, X23).
//!
//! Record locks belong to the process, so a forked child does not keep a dead parent's role alive, and the kernel names
//! the holder's pid. Their price: closing *any* descriptor of the file releases the process's lock on it. So every lock
//! file is opened through this module, which keeps account of the files that this process has locked and never opens
//! one of those again.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvsluice_layout::ids::ProcessEpoch;
use kvsluice_layout::planted::planted;
use nix::fcntl::{FcntlArg, fcntl};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::ftruncate;
use rustix::io::{pread, pwrite};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::names::{ChannelName, Role};
use crate::runtime_dir::{ChannelDir, RuntimeDir, RuntimeDirError};
use crate::segment::Identity;

/// Locks of this process, by (device, inode). A forked child inherits the list, but not the locks.
static OWN: Mutex<BTreeMap<(u64, u64), Own>> = Mutex::new(BTreeMap::new());

/// A lock of this process.
struct Own {
    epoch: ProcessEpoch,
    /// The process that took it.
    pid: u32,
    /// Descriptors of the file that were opened before it was locked: closing one would release the lock.
    kept: Vec<OwnedFd>,
}

/// The process that fills a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its pid as this process sees it; `None` where it lives in a pid namespace that this process cannot see (X28).
    pub pid: Option<u32>,
    /// What it wrote into its lock file: its epoch and its pid as it sees itself. `None` before it did.
    pub said: Option<(ProcessEpoch, u32)>,
}

impl Holder {
    /// The pid to show: the kernel's word, else the process's own.
    pub fn shown_pid(&self) -> Option<u32> {
        self.pid.or(self.said.map(|(_, pid)| pid))
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, self.said) {
            (Some(pid), _) => write!(f, "pid {pid}"),
            (None, Some((_, pid))) => write!(f, "pid {pid} of another pid namespace"),
            (None, None) => f.write_str("a process of another pid namespace"),
        }
    }
}

/// Why a role could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process fills it (X20).
    #[error(
        "{role} of channel {channel} is {holder} already ({path}); stop it first, or give this one another channel"
    )]
    Held {
        /// The role.
        role: Role,
        /// The channel.
        channel: String,
        /// The process that fills it.
        holder: Holder,
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file cannot be used.
    #[error(transparent)]
    File(#[from] RuntimeDirError),
    /// The lock file was replaced again and again.
    #[error("{path} is being replaced all the time; something else uses the channel's folder")]
    Replaced {
        /// The lock file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {step} {path}: {source}")]
    System {
        /// The lock file.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A role of a channel that this process fills.
///
/// # Drop behaviour
/// Removes the lock file, if its name still means this file, and releases the role. A forked child's copy does neither.
/// After a crash the kernel releases the role and the file stays; the next process of the role takes it over.
#[derive(Debug)]
pub struct RoleLock {
    dir: ChannelDir,
    role: Role,
    epoch: ProcessEpoch,
    identity: Identity,
    owner_pid: u32,
    /// Closing it releases the lock.
    _file: OwnedFd,
}

impl RoleLock {
    /// Takes a role. A holder that is about to end is given `patience` to do so; the others are named at once.
    ///
    /// # Errors
    /// [`LockError::Held`] with the holder's pid, or what is wrong with the file.
    pub fn acquire(dir: &ChannelDir, role: Role, epoch: ProcessEpoch, patience: Duration) -> Result<Self, LockError> {
        let until = Instant::now() + patience;
        loop {
            match Self::try_acquire(dir, role, epoch) {
                Err(LockError::Held { holder, .. }) if Instant::now() < until => await_end(holder, until),
                result => return result,
            }
        }
    }

    /// Takes a role of a channel whose folder is made first where it is not there: again, where the last process of the
    /// channel takes it away meanwhile.
    ///
    /// # Errors
    /// As [`Self::acquire`] and [`RuntimeDir::channel`].
    pub fn acquire_in(
        runtime: &RuntimeDir,
        name: &ChannelName,
        role: Role,
        epoch: ProcessEpoch,
        patience: Duration,
    ) -> Result<Self, LockError> {
        let mut attempts = 0;
        loop {
            let dir = runtime.channel(name)?;
            match Self::acquire(&dir, role, epoch, patience) {
                // Nothing can be made in a folder that was removed.
                Err(LockError::File(_)) if dir.check_still_there().is_err() && attempts < 64 => attempts += 1,
                result => return result,
            }
        }
    }

    fn try_acquire(dir: &ChannelDir, role: Role, epoch: ProcessEpoch) -> Result<Self, LockError> {
        let name = role.lock_file();
        let path = dir.path_of(&name);
        let failed = |step| {
            let path = path.clone();
            move |source: io::Error| LockError::System { path, step, source }
        };
        let held = |holder| LockError::Held {
            role,
            channel: dir.name().to_string(),
            holder,
            path: path.clone(),
        };
        // A file that is removed between opening and locking guards nothing: look again, a few times.
        for _ in 0..64 {
            let mut own = OWN.lock();
            if let Some(holder) = own_holder(&own, dir.identity_of(&name).map_err(failed("look at"))?) {
                return Err(held(holder));
            }
            let file = dir.open_file(&name, true)?;
            let identity = Identity::of_descriptor(&file).map_err(failed("look at"))?;
            match fcntl(&file, FcntlArg::F_SETLK(&whole(libc::F_WRLCK))) {
                Ok(_) => {}
                Err(nix::Error::EAGAIN | nix::Error::EACCES) => match holder_of(&file).map_err(failed("look at"))? {
                    Some(holder) => return Err(held(holder)),
                    // It ended in between.
                    None => continue,
                },
                Err(error) => return Err(failed("lock")(error.into())),
            }
            // X23
            let now = dir.identity_of(&name).map_err(failed("look at"))?;
            if now != Some(identity) && !planted("x23_unchecked_inode") {
                continue;
            }
            let said = format!("{} {}\n", epoch.get(), std::process::id());
            ftruncate(&file, 0).map_err(|e| failed("write")(e.into()))?;
            pwrite(&file, said.as_bytes(), 0).map_err(|e| failed("write")(e.into()))?;
            let (pid, kept) = (std::process::id(), Vec::new());
            own.insert((identity.device, identity.inode), Own { epoch, pid, kept });
            return Ok(Self {
                dir: dir.clone(),
                role,
                epoch,
                identity,
                owner_pid: std::process::id(),
                _file: file,
            });
        }
        Err(LockError::Replaced { path })
    }

    /// The role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The epoch that the lock was taken with.
    pub fn epoch(&self) -> ProcessEpoch {
        self.epoch
    }

    /// Checks that others still find this lock under its name: the folder and the file are where they were (X27).
    ///
    /// # Errors
    /// [`RuntimeDirError::Gone`] where either was deleted or replaced; the role can then be filled twice.
    pub fn check_still_there(&self) -> Result<(), RuntimeDirError> {
        self.dir.check_still_there()?;
        let file = self.role.lock_file();
        let path = self.dir.path_of(&file);
        match self.dir.identity_of(&file) {
            Ok(now) if now == Some(self.identity) => Ok(()),
            Ok(_) => Err(RuntimeDirError::Gone { path }),
            Err(source) => Err(RuntimeDirError::System {
                path,
                step: "look at",
                source,
            }),
        }
    }

    /// The channel's folder.
    pub fn dir(&self) -> &ChannelDir {
        &self.dir
    }
}

impl Drop for RoleLock {
    fn drop(&mut self) {
        if std::process::id() != self.owner_pid {
            return;
        }
        if let Err(error) = self.dir.remove_file(&self.role.lock_file(), self.identity) {
            tracing::warn!(role = %self.role, channel = %self.dir.name(), %error, "the lock file stays behind");
        }
        OWN.lock().remove(&(self.identity.device, self.identity.inode));
    }
}

/// An eye on a role that another process fills: says when that process is gone, by the lock (X23).
///
/// It looks at the very file that was locked when the watch began, whatever becomes of its name. A role of this process
/// itself can be watched as well, and one that is watched can be taken.
///
/// # Drop behaviour
/// Closes the file, unless this process has locked it meanwhile: then it stays open for as long as the lock lasts.
#[derive(Debug)]
pub struct LockWatch {
    /// `None` for a lock of this process, whose file must not be opened again.
    file: Option<OwnedFd>,
    identity: Identity,
    epoch: Option<ProcessEpoch>,
}

impl LockWatch {
    /// Begins to watch a role, filled by the process with `epoch` where that is known. `None` where nobody ever filled it.
    ///
    /// # Errors
    /// What is wrong with the lock file.
    pub fn open(dir: &ChannelDir, role: Role, epoch: Option<ProcessEpoch>) -> Result<Option<Self>, RuntimeDirError> {
        let name = role.lock_file();
        let look_at = |source| RuntimeDirError::System {
            path: dir.path_of(&name),
            step: "look at",
            source,
        };
        // Held to the end, so that this process does not lock the file while it is being opened here.
        let own = OWN.lock();
        let named = dir.identity_of(&name).map_err(look_at)?;
        if let Some(identity) = named.filter(|_| own_holder(&own, named).is_some() && !planted("x23_watch_opens_own")) {
            return Ok(Some(Self {
                file: None,
                identity,
                epoch,
            }));
        }
        let file = match dir.open_file(&name, false) {
            Err(RuntimeDirError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let identity = Identity::of_descriptor(&file).map_err(look_at)?;
        Ok(Some(Self {
            file: Some(file),
            identity,
            epoch,
        }))
    }

    /// The process that fills the role now; `None` once it is proven that the watched one does not any more: the lock is
    /// free, or the file tells another epoch.
    ///
    /// # Errors
    /// The system's error, which proves nothing.
    pub fn holder(&self) -> io::Result<Option<Holder>> {
        let holder = match own_holder(&OWN.lock(), Some(self.identity)) {
            Some(own) => Some(own),
            None => self.file.as_ref().map(holder_of).transpose()?.flatten(),
        };
        let replaced = |holder: &Holder| match (self.epoch, holder.said) {
            (Some(watched), Some((epoch, _))) => watched != epoch,
            _ => false,
        };
        Ok(holder.filter(|holder| !replaced(holder)))
    }
}

impl Drop for LockWatch {
    fn drop(&mut self) {
        let mut own = OWN.lock();
        let lock = own.get_mut(&(self.identity.device, self.identity.inode));
        match lock.filter(|lock| lock.pid == std::process::id() && !planted("x23_watch_opens_own")) {
            Some(lock) => lock.kept.extend(self.file.take()),
            None => self.file = None,
        }
    }
}

/// A lock of this process, which the kernel would not show to it.
fn own_holder(own: &BTreeMap<(u64, u64), Own>, file: Option<Identity>) -> Option<Holder> {
    let file = file?;
    let Own { epoch, pid, .. } = own.get(&(file.device, file.inode))?;
    (*pid == std::process::id()).then_some(Holder {
        pid: Some(*pid),
        said: Some((*epoch, *pid)),
    })
}

/// Asks the kernel who holds the lock of an open file.
fn holder_of(file: &OwnedFd) -> io::Result<Option<Holder>> {
    let mut lock = whole(libc::F_WRLCK);
    fcntl(file, FcntlArg::F_GETLK(&mut lock))?;
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    let mut text = [0; 64];
    let length = pread(file, &mut text, 0)?;
    let said = text.get(..length).and_then(|text| {
        let (epoch, pid) = std::str::from_utf8(text).ok()?.strip_suffix('\n')?.split_once(' ')?;
        Some((ProcessEpoch(epoch.parse().ok()?), pid.parse().ok()?))
    });
    Ok(Some(Holder {
        // 0 and -1: a holder that has no pid in this namespace.
        pid: u32::try_from(lock.l_pid).ok().filter(|pid| *pid != 0),
        said,
    }))
}

/// A lock of the whole file.
fn whole(kind: libc::c_int) -> libc::flock {
    // SAFETY: `flock` is plain numbers; all zero is a valid one, and means "from the start to the end".
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Waits until a process ends or the time is over. The lock, not this, decides what is true afterwards.
fn await_end(holder: Holder, until: Instant) {
    let left = until.saturating_duration_since(Instant::now());
    let pid = holder.pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // Without a pid there is nothing to wait on but the lock itself; and a pid may be visible a moment after its lock.
    let slice = if pidfd.is_some() {
        left
    } else {
        left.min(Duration::from_millis(5))
    };
    let timeout = Timespec::try_from(slice).ok();
    let mut watched = Vec::from_iter(pidfd.as_ref().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
    // An interruption only makes the caller look at the lock earlier.
    if poll(&mut watched, timeout.as_ref()).is_ok_and(|ended| ended > 0) {
        // A process is seen to end after its locks are gone; whatever still holds this one must not make the caller spin.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::ids::Rank;

    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::peers::Peers;
    use crate::test_process::{Second, listen, part, say};

    const EPOCH: ProcessEpoch = ProcessEpoch(0xfeed);

    fn channel(folder: &std::path::Path) -> ChannelDir {
        let runtime = RuntimeDir::open(folder, &Peers::default()).unwrap();
        runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
    }

    /// The second process: takes the producer's role in the folder it is given and keeps it until it is told otherwise.
    fn hold(folder: &str) {
        let lock = RoleLock::acquire(
            &channel(folder.as_ref()),
            Role::Producer,
            ProcessEpoch(7),
            Duration::ZERO,
        )
        .unwrap();
        say("held");
        if listen() == "fork" {
            // SAFETY: the child only sleeps and ends; it touches nothing of this process's memory.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: both calls may be made between fork and exit.
                unsafe {
                    libc::sleep(60);
                    libc::_exit(0);
                }
            }
            say(&child.to_string());
            listen();
        }
        drop(lock);
        say("released");
        listen();
    }

    fn acquire(channel: &ChannelDir, patience: Duration) -> Result<RoleLock, LockError> {
        RoleLock::acquire(channel, Role::Producer, EPOCH, patience)
    }

    #[test]
    fn x20_a_second_producer_is_refused_with_the_pid_of_the_first() {
        if let Some(folder) = part() {
            return hold(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        let mut first = Second::start(temp.path().to_str().unwrap());
        assert_eq!(first.hear(), "held");
        let error = acquire(&channel, Duration::ZERO).unwrap_err();
        let said = error.to_string();
        assert!(
            said.starts_with(&format!("producer of channel engine is pid {} already", first.pid())),
            "{said}"
        );
        assert!(said.contains("engine/producer.lock"), "{said}");
        let LockError::Held { holder, .. } = error else {
            panic!("{said}")
        };
        assert_eq!(holder.said, Some((ProcessEpoch(7), first.pid())));

        // Another rank's role is another role.
        RoleLock::acquire(&channel, Role::Rank(Rank(0)), EPOCH, Duration::ZERO).unwrap();
        first.tell("release");
        assert_eq!(first.hear(), "released");
        assert_eq!(channel.roles("lock").unwrap(), [], "a normal exit leaves no file (X27)");
        acquire(&channel, Duration::ZERO).unwrap();
    }

    #[test]
    fn x23_a_killed_holder_is_proven_dead_by_its_lock() {
        if let Some(folder) = part() {
            return hold(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        assert!(LockWatch::open(&channel, Role::Producer, None).unwrap().is_none());
        let mut first = Second::start(temp.path().to_str().unwrap());
        assert_eq!(first.hear(), "held");
        let watch = LockWatch::open(&channel, Role::Producer, Some(ProcessEpoch(7)))
            .unwrap()
            .unwrap();
        assert_eq!(watch.holder().unwrap().unwrap().pid, Some(first.pid()));
        first.kill();
        assert_eq!(watch.holder().unwrap(), None);

        // The next holder of the same file is not the watched one.
        let lock = acquire(&channel, Duration::ZERO).unwrap();
        assert_eq!((lock.role(), lock.epoch()), (Role::Producer, EPOCH));
        let watch = LockWatch::open(&channel, Role::Producer, None).unwrap().unwrap();
        assert_eq!(watch.holder().unwrap().unwrap().said, Some((EPOCH, std::process::id())));
        assert!(
            acquire(&channel, Duration::ZERO)
                .unwrap_err()
                .to_string()
                .contains("is pid")
        );
    }

    #[test]
    fn x23_a_watched_holder_is_gone_once_the_lock_file_tells_another_epoch() {
        if let Some(folder) = part() {
            return hold(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        let mut second = Second::start(temp.path().to_str().unwrap());
        assert_eq!(second.hear(), "held");
        let watch = LockWatch::open(&channel, Role::Producer, Some(ProcessEpoch(6)))
            .unwrap()
            .unwrap();
        assert_eq!(watch.holder().unwrap(), None, "epoch 7 holds it, epoch 6 was watched");
    }

    #[test]
    fn x23_a_watch_of_a_role_never_releases_this_processes_own_lock_on_it() {
        if let Some(folder) = part() {
            let taken = acquire(&channel(folder.as_ref()), Duration::ZERO);
            say(if taken.is_ok() { "taken" } else { "refused" });
            return;
        }
        let others_find_it = |watch_first: bool| {
            let temp = tempfile::tempdir().unwrap();
            let channel = channel(temp.path());
            let watch = || LockWatch::open(&channel, Role::Producer, None).unwrap();
            channel.open_file("producer.lock", true).unwrap();
            let early = watch_first.then(watch);
            let lock = acquire(&channel, Duration::ZERO).unwrap();
            let watch = early.unwrap_or_else(watch).unwrap();
            assert_eq!(watch.holder().unwrap().unwrap().pid, Some(std::process::id()));
            drop(watch);
            let found = Second::start(temp.path().to_str().unwrap()).hear();
            drop(lock);
            found
        };
        for watch_first in [false, true] {
            assert_eq!(others_find_it(watch_first), "refused");
            let planted = with_planted("x23_watch_opens_own", || others_find_it(watch_first));
            assert_eq!(planted, "taken", "the planted fault is not seen");
        }
    }

    #[test]
    fn x27_a_folder_that_the_last_process_took_away_is_made_again() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(temp.path(), &Peers::default()).unwrap();
        let name = ChannelName::new("engine").unwrap();
        // Between the look at the folder and the lock in it: what `acquire_in` begins anew for.
        let dir = runtime.channel(&name).unwrap();
        assert!(runtime.remove(&dir).unwrap());
        let error = acquire(&dir, Duration::ZERO).unwrap_err();
        assert!(
            matches!(error, LockError::File(_)) && dir.check_still_there().is_err(),
            "{error}"
        );
        let lock = RoleLock::acquire_in(&runtime, &name, Role::Producer, EPOCH, Duration::ZERO).unwrap();
        lock.check_still_there().unwrap();
        // In use, it stays.
        assert!(!runtime.remove(lock.dir()).unwrap());
    }

    #[test]
    fn x28_a_forked_child_does_not_keep_the_role_of_its_dead_parent() {
        if let Some(folder) = part() {
            return hold(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        let mut first = Second::start(temp.path().to_str().unwrap());
        assert_eq!(first.hear(), "held");
        first.tell("fork");
        let child: i32 = first.hear().parse().unwrap();
        first.kill();
        let lock = acquire(&channel, Duration::ZERO);
        rustix::process::kill_process(Pid::from_raw(child).unwrap(), rustix::process::Signal::KILL).unwrap();
        lock.unwrap();
    }

    #[test]
    fn x23_a_holder_that_is_about_to_end_is_waited_for() {
        if let Some(folder) = part() {
            return hold(&folder);
        }
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        let mut first = Second::start(temp.path().to_str().unwrap());
        assert_eq!(first.hear(), "held");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| acquire(&channel, Duration::from_secs(60)));
            first.kill();
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn x23_a_lock_on_a_file_that_was_replaced_is_not_the_role() {
        let temp = tempfile::tempdir().unwrap();
        let channel = channel(temp.path());
        // The name vanishes under the holder: the role is free for whoever comes, and the old one removes nothing.
        let old = acquire(&channel, Duration::ZERO).unwrap();
        old.check_still_there().unwrap();
        std::fs::remove_file(channel.path_of("producer.lock")).unwrap();
        let said = old.check_still_there().unwrap_err().to_string();
        assert!(
            said.contains("engine/producer.lock was deleted or replaced while the channel was in use"),
            "{said}"
        );
        let new = acquire(&channel, Duration::ZERO).unwrap();
        assert!(old.check_still_there().is_err() && new.check_still_there().is_ok());
        drop(old);
        assert_eq!(
            channel.roles("lock").unwrap(),
            [Role::Producer],
            "field 7: the old one unlinked the new one's file"
        );
        drop(new);
        assert_eq!(channel.roles("lock").unwrap(), []);
    }

    #[test]
    fn x23_many_that_come_and_go_never_fill_a_role_twice() {
        if let Some(folder) = part() {
            // Takes and releases the role over and over; each holder marks it with a file of its own.
            let channel = channel(folder.as_ref());
            let mark = channel.path_of("mark");
            let (mut taken, mut twice) = (0, 0);
            while taken < 200 {
                let Ok(_lock) = acquire(&channel, Duration::ZERO) else {
                    continue;
                };
                taken += 1;
                match std::fs::File::create_new(&mark) {
                    Ok(_) => std::fs::remove_file(&mark).unwrap(),
                    Err(_) => twice += 1,
                }
            }
            say(&twice.to_string());
            listen();
            return;
        }
        let twice = |fault: &str| {
            let temp = tempfile::tempdir().unwrap();
            let mut all = [0; 3].map(|_| Second::start_planted(temp.path().to_str().unwrap(), fault));
            all.iter_mut()
                .map(|second| second.hear().parse::<u32>().unwrap())
                .sum::<u32>()
        };
        assert_eq!(twice(""), 0);
        // It goes red: without the look at the inode after locking, two soon hold the role at once.
        assert!((0..20).any(|_| twice("x23_unchecked_inode") > 0));
    }
}
