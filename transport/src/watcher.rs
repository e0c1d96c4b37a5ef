//! One thread that notices deaths, and knocks at a door, as the kernel reports them (X23).
//!
//! It sleeps in epoll on the peers' pidfds and sockets, notes what it sees and wakes the process's own sleeper. A peer
//! without a pidfd is watched through its role lock, which has to be asked for.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use crate::link::Link;
use crate::liveness::{Life, PeerLife, Proof};

/// How often the lock of a peer without a pidfd is asked for: within the 100 ms of X23, at a few microseconds each.
const LOCK_LOOK: Duration = Duration::from_millis(25);

/// What an epoll event is about, in the low bits of its data; the watch's number is above.
const PIDFD: u64 = 0;
const SOCKET: u64 = 1;
const DOOR: u64 = 2;
const STOP: u64 = 3;
const KINDS: u64 = 4;

/// Called when something was seen, without any lock held: rings the sleeper's bell.
pub type Notify = Arc<dyn Fn() + Send + Sync>;

/// The watching thread.
///
/// # Drop behaviour
/// Ends the thread and waits for it. Watches that are still held see nothing more.
pub struct Watcher {
    shared: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    epoll: OwnedFd,
    stop: OwnedFd,
    notify: Notify,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    next: u64,
    watched: BTreeMap<u64, Entry>,
}

enum Entry {
    Peer {
        proof: Arc<Proof>,
        life: PeerLife,
        /// `None` once it has hung up.
        socket: Option<OwnedFd>,
    },
    Door {
        /// A copy, so that it can be taken out of the epoll whatever becomes of the original.
        ready: OwnedFd,
        knocked: Arc<AtomicBool>,
    },
}

/// A peer under watch.
///
/// # Drop behaviour
/// Ends the watch and closes the watcher's copy of the connection.
pub struct PeerWatch {
    shared: Arc<Watched>,
    number: u64,
    proof: Arc<Proof>,
    life: PeerLife,
}

/// A door under watch.
///
/// # Drop behaviour
/// Ends the watch.
pub struct DoorWatch {
    shared: Arc<Watched>,
    number: u64,
    knocked: Arc<AtomicBool>,
}

impl Watcher {
    /// Starts the thread. It calls `notify` after every new thing it has noted.
    ///
    /// # Errors
    /// The system's error: out of descriptors or threads.
    pub fn start(notify: Notify) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let shared = Arc::new(Watched {
            epoll,
            stop,
            notify,
            entries: Mutex::default(),
        });
        let watched = shared.clone();
        let thread = std::thread::Builder::new()
            .name("kvsluice watcher".into())
            .spawn(move || watched.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Watches a peer and the connection to it.
    ///
    /// # Errors
    /// The system's error: out of descriptors.
    pub fn peer(&self, proof: Proof, link: &Link) -> io::Result<PeerWatch> {
        let (proof, life) = (Arc::new(proof), PeerLife::default());
        let socket = rustix::io::fcntl_dupfd_cloexec(link, 0)?;
        let mut entries = self.shared.entries.lock();
        let number = entries.take_number();
        let data = |kind| epoll::EventData::new_u64(number * KINDS + kind);
        epoll::add(&self.shared.epoll, &socket, data(SOCKET), epoll::EventFlags::RDHUP)?;
        if let Some(pidfd) = proof.pidfd() {
            epoll::add(&self.shared.epoll, pidfd, data(PIDFD), epoll::EventFlags::IN)?;
        }
        let entry = Entry::Peer {
            proof: proof.clone(),
            life: life.clone(),
            socket: Some(socket),
        };
        entries.watched.insert(number, entry);
        drop(entries);
        if proof.pidfd().is_none() {
            // The thread sleeps without end while all have a pidfd.
            self.shared.poke();
        }
        Ok(PeerWatch {
            shared: self.shared.clone(),
            number,
            proof,
            life,
        })
    }

    /// Watches a door, such as [`crate::attach::Reception::ready`]: a knock is noted until it is taken.
    ///
    /// # Errors
    /// The system's error: out of descriptors.
    pub fn door(&self, ready: BorrowedFd<'_>) -> io::Result<DoorWatch> {
        let knocked = Arc::new(AtomicBool::new(true));
        let ready = rustix::io::fcntl_dupfd_cloexec(ready, 0)?;
        let mut entries = self.shared.entries.lock();
        let number = entries.take_number();
        // Edge-triggered: who knocks is noted once, not for as long as the door's owner is busy.
        let (data, flags) = (epoll::EventData::new_u64(number * KINDS + DOOR), epoll::EventFlags::IN);
        epoll::add(&self.shared.epoll, &ready, data, flags | epoll::EventFlags::ET)?;
        let entry = Entry::Door {
            ready,
            knocked: knocked.clone(),
        };
        entries.watched.insert(number, entry);
        Ok(DoorWatch {
            shared: self.shared.clone(),
            number,
            knocked,
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.ended();
        if let Some(thread) = self.thread.take() {
            // A panic over there was printed over there.
            let _ = thread.join();
        }
    }
}

impl PeerWatch {
    /// What is known of the peer.
    pub fn life(&self) -> Life {
        self.life.get()
    }

    /// The peer's proof, to ask directly or to expel it.
    pub fn proof(&self) -> &Proof {
        &self.proof
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        self.shared.forget(self.number);
    }
}

impl DoorWatch {
    /// True once after somebody knocked or spoke: poll the door then.
    pub fn knocked(&self) -> bool {
        // Relaxed load first: a busy loop asks all the time, and a write would take the line from the watcher.
        // pairs with: Watched::note; nothing but the flag itself is announced by it.
        self.knocked.load(Ordering::Relaxed) && self.knocked.swap(false, Ordering::Relaxed)
    }
}

impl Drop for DoorWatch {
    fn drop(&mut self) {
        self.shared.forget(self.number);
    }
}

impl Entries {
    fn take_number(&mut self) -> u64 {
        // From 1, so that no watch has the number of the stop event.
        self.next += 1;
        self.next
    }
}

impl Watched {
    fn run(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let look = self.lock_look();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(
                &self.epoll,
                spare,
                look.and_then(|look| Timespec::try_from(look).ok()).as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    // Nothing is noticed any more: whoever waits still asks the proof itself every 50 ms.
                    tracing::error!(%error, "the watcher cannot wait and ends");
                    return;
                }
            }
            let mut news = false;
            for event in &events {
                match event.data.u64() {
                    STOP => match self.stopped() {
                        true => return,
                        false => continue,
                    },
                    data => news |= self.note(data / KINDS, data % KINDS),
                }
            }
            if look.is_some() {
                news |= self.ask_locks();
            }
            if news {
                (self.notify)();
            }
        }
    }

    /// Notes an event; true where something is new.
    fn note(&self, number: u64, kind: u64) -> bool {
        let mut entries = self.entries.lock();
        match entries.watched.get_mut(&number) {
            Some(Entry::Door { knocked, .. }) => {
                // pairs with: DoorWatch::knocked.
                !knocked.swap(true, Ordering::Relaxed)
            }
            Some(Entry::Peer { life, socket, .. }) if kind == SOCKET => {
                // X23: a closed socket makes a peer suspect, no more.
                if let Some(socket) = socket.take() {
                    let _ = epoll::delete(&self.epoll, &socket);
                }
                life.worsen(Life::Suspect)
            }
            Some(Entry::Peer { proof, life, .. }) => {
                if !proof.is_dead() {
                    return false;
                }
                if let Some(pidfd) = proof.pidfd() {
                    let _ = epoll::delete(&self.epoll, pidfd);
                }
                life.worsen(Life::Dead)
            }
            None => false,
        }
    }

    /// How long the thread may sleep: without end, unless a peer can only be asked for by its lock.
    fn lock_look(&self) -> Option<Duration> {
        let entries = self.entries.lock();
        entries.watched.values().any(by_lock_only).then_some(LOCK_LOOK)
    }

    fn ask_locks(&self) -> bool {
        let entries = self.entries.lock();
        let asked = entries.watched.values().filter(|entry| by_lock_only(entry));
        let mut news = false;
        for entry in asked {
            if let Entry::Peer { proof, life, .. } = entry
                && proof.is_dead()
            {
                news |= life.worsen(Life::Dead);
            }
        }
        news
    }

    fn forget(&self, number: u64) {
        match self.entries.lock().watched.remove(&number) {
            Some(Entry::Peer { proof, socket, .. }) => {
                // Either may have been taken out already.
                let _ = socket.map(|socket| epoll::delete(&self.epoll, &socket));
                let _ = proof.pidfd().map(|pidfd| epoll::delete(&self.epoll, pidfd));
            }
            Some(Entry::Door { ready, .. }) => {
                let _ = epoll::delete(&self.epoll, &ready);
            }
            None => {}
        }
    }

    /// Makes the thread look around.
    fn poke(&self) {
        // A full counter wakes it as well.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Makes the thread end.
    fn ended(&self) {
        let _ = rustix::io::write(&self.stop, &(1u64 << 32).to_ne_bytes());
    }

    fn stopped(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(self.stop.as_fd(), &mut count).is_ok() && u64::from_ne_bytes(count) >> 32 != 0
    }
}

fn by_lock_only(entry: &Entry) -> bool {
    matches!(entry, Entry::Peer { proof, life, .. } if proof.pidfd().is_none() && life.get() != Life::Dead)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use kvsluice_layout::ids::{ProcessEpoch, Rank};
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::link::Listener;
    use crate::lock::RoleLock;
    use crate::names::{ChannelName, Role};
    use crate::peers::Peers;
    use crate::runtime_dir::{ChannelDir, RuntimeDir};
    use crate::test_process::{Second, listen, part, say};

    const MINUTE: Duration = Duration::from_secs(60);

    fn dir(folder: &std::path::Path) -> ChannelDir {
        let runtime = RuntimeDir::open(folder, &Peers::default()).unwrap();
        runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
    }

    /// The second process: a worker that connects and then does as it is told.
    fn work(folder: &str) {
        let dir = dir(folder.as_ref());
        let lock = RoleLock::acquire(&dir, Role::Rank(Rank(0)), ProcessEpoch(7), Duration::ZERO).unwrap();
        let mut link = Some(Link::connect(&dir, Role::Producer).unwrap());
        say("connected");
        while listen() == "hang up" {
            link.take();
            say("hung up");
        }
        drop(lock);
    }

    struct Scene {
        second: Second,
        watcher: Watcher,
        watch: Option<PeerWatch>,
        news: Receiver<()>,
        _link: Link,
        _listener: Listener,
        _lock: RoleLock,
        _temp: tempfile::TempDir,
    }

    fn scene(with_pidfd: bool) -> Scene {
        let temp = tempfile::tempdir().unwrap();
        let dir = dir(temp.path());
        let lock = RoleLock::acquire(&dir, Role::Producer, ProcessEpoch(1), Duration::ZERO).unwrap();
        let listener = Listener::bind(&lock).unwrap();
        let mut second = Second::start(temp.path().to_str().unwrap());
        assert_eq!(second.hear(), "connected");
        let link = listener.accept().unwrap().unwrap();
        let mut peer = link.peer().unwrap();
        if !with_pidfd {
            peer.pidfd = None;
        }
        let proof = Proof::of(&mut peer, &dir, Role::Rank(Rank(0)), ProcessEpoch(7)).unwrap();
        let (tell, news) = channel();
        let tell = Mutex::new(tell);
        let watcher = Watcher::start(Arc::new(move || _ = tell.lock().send(()))).unwrap();
        let watch = watcher.peer(proof, &link).unwrap();
        assert_eq!(watch.life(), Life::Alive);
        Scene {
            second,
            watcher,
            watch: Some(watch),
            news,
            _link: link,
            _listener: listener,
            _lock: lock,
            _temp: temp,
        }
    }

    impl Scene {
        fn life(&self) -> Life {
            self.watch.as_ref().unwrap().life()
        }

        /// Waits for the watcher's word until the peer is in that state.
        fn until(&self, life: Life) {
            while self.life() < life {
                self.news.recv_timeout(MINUTE).expect("the watcher notices it");
            }
            assert_eq!(self.life(), life);
        }
    }

    #[test]
    fn x23_a_killed_peer_is_proven_dead_by_its_pidfd_and_the_sleeper_is_woken() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        let mut scene = scene(true);
        assert!(scene.watch.as_ref().unwrap().proof().pidfd().is_some());
        scene.second.kill();
        scene.until(Life::Dead);
    }

    #[test]
    fn x28_without_a_pidfd_the_role_lock_is_the_proof() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        let mut scene = scene(false);
        assert!(scene.watch.as_ref().unwrap().proof().pidfd().is_none());
        scene.second.kill();
        scene.until(Life::Dead);
    }

    #[test]
    fn x23_a_peer_that_only_hangs_up_is_suspect_and_not_dead() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        for with_pidfd in [true, false] {
            let mut scene = scene(with_pidfd);
            scene.second.tell("hang up");
            assert_eq!(scene.second.hear(), "hung up");
            scene.until(Life::Suspect);
            assert!(!scene.watch.as_ref().unwrap().proof().is_dead());
            scene.second.kill();
            scene.until(Life::Dead);
        }
    }

    #[test]
    fn x28_a_stopped_peer_is_alive_and_can_be_expelled() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        let scene = scene(true);
        let pid = Pid::from_raw(scene.second.pid() as i32).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let proof = scene.watch.as_ref().unwrap().proof();
        assert!(!proof.is_dead());
        assert_eq!(scene.life(), Life::Alive);
        proof.expel().unwrap();
        scene.until(Life::Dead);
        // Twice is no error: it is gone either way.
        proof.expel().unwrap();
    }

    #[test]
    fn x23_a_peer_that_cannot_be_reached_is_not_expelled_but_named() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        let scene = scene(false);
        let said = scene.watch.as_ref().unwrap().proof().expel().unwrap_err().to_string();
        let wanted = format!("rank-0 (pid {}) cannot be killed from here", scene.second.pid());
        assert!(said.starts_with(&wanted), "{said}");
    }

    #[test]
    fn x23_a_watch_that_ended_notices_nothing_and_disturbs_nobody() {
        if let Some(folder) = part() {
            return work(&folder);
        }
        let mut scene = scene(true);
        let life = scene.watch.as_ref().unwrap().life.clone();
        scene.watch.take();
        scene.second.kill();
        // A second death, noticed later than the first would have been.
        let (mut second, news) = (self::scene(true), &scene.news);
        second.second.kill();
        second.until(Life::Dead);
        assert_eq!(life.get(), Life::Alive);
        drop(scene.watcher);
        assert!(news.try_recv().is_err());
    }

    #[test]
    fn x20_a_knock_at_the_door_is_noted_once() {
        let temp = tempfile::tempdir().unwrap();
        let dir = dir(temp.path());
        let lock = RoleLock::acquire(&dir, Role::Producer, ProcessEpoch(1), Duration::ZERO).unwrap();
        let listener = Listener::bind(&lock).unwrap();
        let (tell, news) = channel();
        let tell = Mutex::new(tell);
        let watcher = Watcher::start(Arc::new(move || _ = tell.lock().send(()))).unwrap();
        let door = watcher.door(listener.as_fd()).unwrap();
        // Whoever knocked before the watch began is not overlooked.
        assert!(door.knocked() && !door.knocked());
        let _link = Link::connect(&dir, Role::Producer).unwrap();
        news.recv_timeout(MINUTE).unwrap();
        assert!(door.knocked() && !door.knocked());
    }
}
