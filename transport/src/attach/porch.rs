//! Where strangers wait until it is clear who they are: bounded in number and in time (X20, X33).
//!
//! A peer that sends half a handshake, nothing at all, or opens a million connections takes one of a few places for a
//! little while and keeps nobody else from attaching.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;

use crate::link::{Link, LinkError, Listener, Peer, Received};

/// How many strangers wait, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Places. The oldest of those who have said nothing yet is turned away when they run out.
    pub guests_max: usize,
    /// Time for the first message, in nanoseconds.
    pub first_ns: u64,
    /// Time for the whole rest, in nanoseconds: a worker opens and checks its segments meanwhile.
    pub rest_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            guests_max: 32,
            first_ns: 2_000_000_000,
            rest_ns: 60_000_000_000,
        }
    }
}

/// How many were turned away, and why. For `status`: a log line each would be a stranger's to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turned {
    /// Processes of a user that is not allowed.
    pub of_other_users: u64,
    /// Those who had to make room.
    pub crowded_out: u64,
    /// Those whose time was over.
    pub silent: u64,
    /// Those who hung up or sent what cannot be read.
    pub unintelligible: u64,
}

/// A connection that has not come to an end yet.
pub(super) struct Guest<S> {
    pub(super) link: Link,
    pub(super) peer: Peer,
    /// What is known of it; `None` before its first message.
    pub(super) known: Option<S>,
    since_ns: u64,
    until_ns: u64,
}

/// What becomes of a guest after a message.
pub(super) enum Next<S, E> {
    /// It stays for the rest of its handshake.
    Stay(Guest<S>),
    /// It goes, with an event or without.
    Go(Option<E>),
}

pub(super) struct Porch<S> {
    listener: Listener,
    limits: Limits,
    guests: Vec<Guest<S>>,
    turned: Turned,
    /// Readable when the listener or a guest is.
    ready: OwnedFd,
}

impl<S> Porch<S> {
    pub(super) fn new(listener: Listener, limits: Limits) -> Result<Self, LinkError> {
        let system = |source: Errno| LinkError::System {
            step: "watch a socket",
            source: source.into(),
        };
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        epoll::add(&ready, &listener, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(system)?;
        Ok(Self {
            listener,
            limits,
            guests: Vec::new(),
            turned: Turned::default(),
            ready,
        })
    }

    /// Readable when a poll has something to do.
    pub(super) fn ready(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    pub(super) fn turned(&self) -> Turned {
        self.turned
    }

    pub(super) fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Lets new connections in, hands every message that has arrived to `talk`, and turns away whose time is over.
    /// `gone` makes an event of a guest that hung up or ran out of time after its first message.
    ///
    /// # Errors
    /// The system's error: this process is out of descriptors or memory. Guests are kept.
    pub(super) fn poll<E>(
        &mut self,
        now_ns: u64,
        mut talk: impl FnMut(&[Guest<S>], Guest<S>, Received) -> Next<S, E>,
        mut gone: impl FnMut(Guest<S>, LinkError) -> Option<E>,
    ) -> Result<Vec<E>, LinkError> {
        self.let_in(now_ns)?;
        let mut events = Vec::new();
        let mut at = 0;
        while let Some(guest) = self.guests.get(at) {
            let received = match guest.link.try_receive() {
                Ok(None) if now_ns < guest.until_ns => {
                    at += 1;
                    continue;
                }
                Ok(Some(received)) => Ok(received),
                Ok(None) => Err(LinkError::Silent {
                    waited_ms: u128::from(now_ns.saturating_sub(guest.since_ns) / 1_000_000),
                }),
                Err(why) => Err(why),
            };
            let mut guest = self.guests.remove(at);
            // Its descriptor may live on elsewhere.
            let _ = epoll::delete(&self.ready, &guest.link);
            match received {
                Ok(received) => {
                    if guest.known.is_none() {
                        guest.until_ns = now_ns.saturating_add(self.limits.rest_ns);
                    }
                    match talk(&self.guests, guest, received) {
                        Next::Stay(guest) => {
                            self.keep(at, guest);
                            at += 1;
                        }
                        Next::Go(event) => events.extend(event),
                    }
                }
                Err(why) => {
                    match why {
                        LinkError::Silent { .. } => self.turned.silent += 1,
                        _ => self.turned.unintelligible += 1,
                    }
                    events.extend(gone(guest, why));
                }
            }
        }
        Ok(events)
    }

    fn let_in(&mut self, now_ns: u64) -> Result<(), LinkError> {
        // No more than there are places, so that a flood cannot keep this loop busy.
        for _ in 0..self.limits.guests_max {
            let Some(link) = self.listener.accept()? else { break };
            let peer = match link.peer() {
                Ok(peer) => peer,
                Err(_) => {
                    self.turned.unintelligible += 1;
                    continue;
                }
            };
            // X20
            if !self.listener.dir().peers().allows(peer.uid) {
                self.turned.of_other_users += 1;
                continue;
            }
            let mut unknown = self
                .guests
                .iter()
                .enumerate()
                .filter(|(_, guest)| guest.known.is_none());
            let oldest = unknown.next().map(|(at, _)| at);
            if let Some(oldest) = oldest.filter(|_| unknown.count() + 1 >= self.limits.guests_max) {
                self.guests.remove(oldest);
                self.turned.crowded_out += 1;
            }
            let guest = Guest {
                link,
                peer,
                known: None,
                since_ns: now_ns,
                until_ns: now_ns.saturating_add(self.limits.first_ns),
            };
            self.keep(self.guests.len(), guest);
        }
        Ok(())
    }

    /// Takes a guest in. One that cannot be watched is still looked at by every poll.
    fn keep(&mut self, at: usize, guest: Guest<S>) {
        let _ = epoll::add(
            &self.ready,
            &guest.link,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        );
        self.guests.insert(at, guest);
    }
}
