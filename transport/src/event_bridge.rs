//! An eventfd for users whose loop is epoll or asyncio (X29).
//!
//! A thread of this process does the waiting and writes the eventfd. The eventfd is never shared with another process: a
//! peer that holds one can make a writer block.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use crate::wait::Bell;

/// An eventfd that becomes readable when there is something to do.
///
/// Use: [`Self::arm`]; wait until the descriptor is readable; [`Self::disarm`]; do everything there is to do; arm again.
///
/// # Drop behaviour
/// Ends the thread and waits for it.
pub struct EventBridge {
    shared: Arc<Shared>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    event: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Armed,
    Ended,
}

/// Told by [`EventBridge`] to its waiting function: whether it is still wanted.
pub struct Wanted {
    shared: Arc<Shared>,
}

impl Wanted {
    /// False once the bridge is being dropped: the function must return then.
    pub fn is_wanted(&self) -> bool {
        *self.shared.state.lock() != State::Ended
    }
}

impl EventBridge {
    /// Starts the thread. `wait` returns once there is something to do or it is not wanted any more, sleeping by a
    /// [`crate::wait::Waiter`] whose bell is `bell`; nobody else may sleep on that segment's sleeping word meanwhile.
    ///
    /// # Errors
    /// The system's error: out of descriptors or threads.
    pub fn start(bell: Bell, mut wait: impl FnMut(&Wanted) + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: Mutex::new(State::Idle),
            changed: Condvar::new(),
        });
        let wanted = Wanted { shared: shared.clone() };
        let run = move || {
            let shared = &wanted.shared;
            loop {
                let mut state = shared.state.lock();
                shared.changed.wait_while(&mut state, |state| *state == State::Idle);
                drop(state);
                wait(&wanted);
                let mut state = shared.state.lock();
                if *state == State::Ended {
                    return;
                }
                *state = State::Idle;
                // A full counter is readable as well.
                let _ = rustix::io::write(&shared.event, &1u64.to_ne_bytes());
            }
        };
        let thread = std::thread::Builder::new().name("kvsluice event".into()).spawn(run)?;
        Ok(Self {
            shared,
            bell,
            thread: Some(thread),
        })
    }

    /// Asks for one event, as soon as there is something to do: at once if there is already.
    pub fn arm(&self) {
        let mut state = self.shared.state.lock();
        if *state == State::Idle {
            *state = State::Armed;
            self.shared.changed.notify_one();
        }
    }

    /// Takes the event, so that the descriptor is not readable any more.
    pub fn disarm(&self) {
        // Nothing to take is no error.
        let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
    }
}

impl AsFd for EventBridge {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl Drop for EventBridge {
    fn drop(&mut self) {
        *self.shared.state.lock() = State::Ended;
        self.shared.changed.notify_one();
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            // A panic over there was printed over there.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::clock::Monotonic;
    use crate::segment::{Mapping, MappingMut};
    use crate::shared::{Shared, SharedMut};
    use crate::wait::{Futexes, Idle, Waiter, wake_sleepers};

    fn segment() -> (MappingMut, Mapping) {
        let memory = memfd_create("bridge", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 4096).unwrap();
        (
            MappingMut::writable(&memory, 4096).unwrap(),
            Mapping::read_only(&memory, 4096).unwrap(),
        )
    }

    fn readable(bridge: &EventBridge, seconds: i64) -> bool {
        let timeout = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(bridge, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    }

    #[test]
    fn x29_an_eventfd_becomes_readable_when_there_is_work() {
        let ((own, own_reader), (peer, peer_reader)) = (segment(), segment());
        let mut waiter = Waiter::new(Futexes, Idle::default());
        let bell = waiter.bell().clone();
        let wait = move |wanted: &Wanted| {
            let peers = [(peer_reader.clone(), 64)];
            let ready = || (peer_reader.load_acquire(128) != 0 || !wanted.is_wanted()).then_some(());
            waiter.wait(&own, 0, &peers, &Monotonic::default(), u64::MAX, ready);
        };
        let bridge = EventBridge::start(bell, wait).unwrap();
        assert!(!readable(&bridge, 0));
        bridge.arm();
        peer.store_release(128, 1);
        wake_sleepers(&Futexes, &peer, 64, [(&own_reader, 0)]);
        assert!(readable(&bridge, 60));
        bridge.disarm();
        assert!(!readable(&bridge, 0));
        // Work that is there already makes it readable at once; and one that waits in vain ends with the bridge.
        bridge.arm();
        assert!(readable(&bridge, 60));
        bridge.disarm();
        peer.store(128, 0);
        bridge.arm();
    }
}
