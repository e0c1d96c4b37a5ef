//! Whether another process of the channel still lives: alive, suspect or proven dead, and never by a timeout (X23).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kvsluice_layout::ids::ProcessEpoch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use crate::attach::Mismatch;
use crate::link::Peer;
use crate::lock::{Holder, LockWatch};
use crate::names::Role;
use crate::runtime_dir::ChannelDir;

/// What the kernel has to say about a process: its pidfd, and the lock of the role that it fills.
///
/// The pidfd speaks as soon as the process has ended; where there is none (a pid namespace, an old kernel), the lock
/// does. Both are released only after the process's memory is.
#[derive(Debug)]
pub struct Proof {
    role: Role,
    holder: Holder,
    pidfd: Option<OwnedFd>,
    lock: LockWatch,
}

/// Why a process could not be ended.
#[derive(Debug, thiserror::Error)]
pub enum ExpelError {
    /// There is no handle on it.
    #[error("{role} ({holder}) cannot be killed from here: this process has no pidfd of it; kill it where it runs")]
    Unreachable {
        /// Its role.
        role: Role,
        /// The process.
        holder: Holder,
    },
    /// The system refused.
    #[error("cannot kill {role} ({holder}): {source}")]
    System {
        /// Its role.
        role: Role,
        /// The process.
        holder: Holder,
        /// The system's error.
        source: io::Error,
    },
}

impl Proof {
    /// Takes hold of a peer: it must hold the lock of its role, with the epoch that it claims.
    ///
    /// # Errors
    /// What does not fit, for both sides to read.
    pub fn of(peer: &mut Peer, dir: &ChannelDir, role: Role, epoch: ProcessEpoch) -> Result<Self, Mismatch> {
        const REMEDY: &str = "take the role's lock before attaching";
        let field = || format!("lock of {role}");
        let shown = peer.pid.map_or_else(
            || "a process of another pid namespace".into(),
            |pid| format!("pid {pid}"),
        );
        let trouble = |error: &dyn std::fmt::Display| Mismatch::new(field(), error, format!("held by {shown}"), REMEDY);
        let lock = LockWatch::open(dir, role, Some(epoch)).map_err(|error| trouble(&error))?;
        let lock = lock.ok_or_else(|| trouble(&"not there"))?;
        let holder = lock.holder().map_err(|error| trouble(&error))?;
        let Some(holder) = holder else {
            return Err(trouble(&"free, or of another epoch"));
        };
        let same = match (holder.pid, peer.pid) {
            (Some(holder), Some(peer)) => holder == peer,
            // One of them cannot be named here: what the lock file says must do.
            _ => holder.said.is_some_and(|(said, _)| said == epoch),
        };
        if !same {
            return Err(Mismatch::occupied(role.to_string(), shown, holder.shown_pid()));
        }
        // A pidfd that was opened by number is the peer's if that number still holds the peer's lock.
        let confirmed = peer.reliable || (holder.pid.is_some() && holder.pid == peer.pid);
        Ok(Self {
            role,
            holder,
            pidfd: peer.pidfd.take().filter(|_| confirmed),
            lock,
        })
    }

    /// The role that the process fills.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The process, for messages.
    pub fn holder(&self) -> Holder {
        self.holder
    }

    /// A descriptor that becomes readable when the process has ended, where there is one.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// True once the process is proven to have ended. An error of the system proves nothing.
    pub fn is_dead(&self) -> bool {
        let ended = self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut watched = [PollFd::new(pidfd, PollFlags::IN)];
            poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|readable| readable == 1)
        });
        ended || matches!(self.lock.holder(), Ok(None))
    }

    /// Kills the process (X23). It is dead only when [`Self::is_dead`] says so.
    ///
    /// # Errors
    /// [`ExpelError`] where there is no pidfd, or the system refuses.
    pub fn expel(&self) -> Result<(), ExpelError> {
        let (role, holder) = (self.role, self.holder);
        let pidfd = self.pidfd.as_ref().ok_or(ExpelError::Unreachable { role, holder })?;
        match pidfd_send_signal(pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(ExpelError::System {
                role,
                holder,
                source: error.into(),
            }),
        }
    }
}

/// True where the process that filled `role` with `epoch` fills it no more, by the word of the lock (X23).
pub(crate) fn has_left(dir: &ChannelDir, role: Role, epoch: ProcessEpoch) -> bool {
    match LockWatch::open(dir, role, Some(epoch)) {
        Ok(watch) => watch.is_none_or(|watch| matches!(watch.holder(), Ok(None))),
        Err(_) => false,
    }
}

/// What is known of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Life {
    /// Nothing says otherwise.
    Alive = 0,
    /// Its socket is closed. It may only have dropped the connection: what it may still touch stays quarantined.
    Suspect = 1,
    /// It has ended, by the kernel's word.
    Dead = 2,
}

/// The life of a peer, as the watcher last saw it. Clones share it. It only ever gets worse.
#[derive(Clone, Debug, Default)]
pub struct PeerLife {
    life: Arc<AtomicU8>,
}

impl PeerLife {
    /// What is known now.
    pub fn get(&self) -> Life {
        // pairs with: PeerLife::worsen. Whoever sees a death also sees what the watcher saw before it.
        match self.life.load(Ordering::Acquire) {
            0 => Life::Alive,
            1 => Life::Suspect,
            _ => Life::Dead,
        }
    }

    /// Notes what was seen; true where it is worse than what was known.
    pub(crate) fn worsen(&self, life: Life) -> bool {
        // pairs with: PeerLife::get.
        self.life.fetch_max(life as u8, Ordering::Release) < life as u8
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::link::{Link, Listener};
    use crate::lock::RoleLock;
    use crate::names::ChannelName;
    use crate::peers::Peers;
    use crate::runtime_dir::RuntimeDir;
    use crate::test_process::{Second, listen, part, say};

    #[test]
    fn x23_a_life_only_gets_worse() {
        let life = PeerLife::default();
        assert_eq!(life.get(), Life::Alive);
        assert!(life.worsen(Life::Suspect) && !life.worsen(Life::Suspect));
        assert!(life.worsen(Life::Dead) && !life.worsen(Life::Suspect) && !life.worsen(Life::Alive));
        assert_eq!(life.clone().get(), Life::Dead);
    }

    #[test]
    fn x28_a_peer_without_a_pid_here_is_known_by_its_lock_and_its_pidfd() {
        let channel = |folder: &str| {
            let runtime = RuntimeDir::open(folder.as_ref(), &Peers::default()).unwrap();
            runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
        };
        if let Some(folder) = part() {
            // In a pid namespace of its own: the producer has no pid here.
            let dir = channel(&folder);
            let link = Link::connect(&dir, Role::Producer).unwrap();
            let mut peer = link.peer().unwrap();
            assert_eq!(peer.pid, None);
            let proof = Proof::of(&mut peer, &dir, Role::Producer, ProcessEpoch(1)).unwrap();
            assert!(proof.pidfd().is_some() && !proof.is_dead());
            say(&proof.holder().to_string());
            say(&proof.expel().unwrap_err().to_string());
            listen();
            say(&proof.is_dead().to_string());
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let dir = channel(temp.path().to_str().unwrap());
        let lock = RoleLock::acquire(&dir, Role::Producer, ProcessEpoch(1), Duration::ZERO).unwrap();
        let listener = Listener::bind(&lock).unwrap();
        let Some(mut second) = Second::start_in_pid_namespace(temp.path().to_str().unwrap()) else {
            return eprintln!("a pid namespace cannot be made here");
        };
        assert_eq!(
            second.hear(),
            format!("pid {} of another pid namespace", std::process::id())
        );
        let said = second.hear();
        assert!(
            said.starts_with("cannot kill producer (pid ") && said.contains("Invalid argument"),
            "{said}"
        );
        // The producer lives, but gives up its role: that is seen by the lock.
        drop((listener, lock));
        second.tell("look");
        assert_eq!(second.hear(), "true");
    }
}
