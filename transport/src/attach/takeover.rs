//! The producer's side of a takeover: call on every worker that is found, and see what has survived (X25).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvsluice_layout::ids::{ChannelId, Incarnation, ProcessEpoch, Rank};

use super::{Call, Mismatch, ProducerSays, Surviving, WorkerSays};
use crate::death;
use crate::link::{Link, LinkError, Received};
use crate::liveness::Proof;
use crate::lock::{Holder, LockWatch, RoleLock};
use crate::names::Role;
use crate::parcel::unpack;
use crate::runtime_dir::{ChannelDir, RuntimeDirError};

/// Most bytes of a worker's residency export.
pub const RESIDENCY_BYTES_MAX: usize = 256 << 20;

/// Why a takeover cannot even begin.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The channel's folder cannot be read.
    #[error(transparent)]
    Folder(#[from] RuntimeDirError),
}

/// A worker that outlived its producer, and what it holds.
#[derive(Debug)]
pub struct Survived {
    /// What it said.
    pub surviving: Surviving,
    /// How its death is proven.
    pub proof: Proof,
    /// The control segment.
    pub control: OwnedFd,
    /// The pool.
    pub pool: OwnedFd,
    /// The worker's own segment.
    pub rank: OwnedFd,
    link: Link,
}

impl Survived {
    /// Takes the worker over. Returns the connection, whose end makes the worker suspect.
    ///
    /// # Errors
    /// [`LinkError`] where it is gone meanwhile.
    pub fn adopt(&self, incarnation: Incarnation, producer_epoch: ProcessEpoch) -> Result<(), LinkError> {
        let adopt = ProducerSays::Adopt {
            incarnation,
            producer_epoch,
        };
        death::point("adopting");
        self.link.send(&adopt, &[])
    }

    /// Asks what the worker knows of its device. Ask once the journal has drained; [`reported`](Self::reported) has the
    /// answer.
    ///
    /// # Errors
    /// [`LinkError`] where it is gone meanwhile.
    pub fn ask_report(&self) -> Result<(), LinkError> {
        self.link.send(&ProducerSays::Report, &[])
    }

    /// The report, opaque here, at most [`RESIDENCY_BYTES_MAX`]. `None` while it has not come.
    ///
    /// # Errors
    /// [`Mismatch`] where the worker is gone, or says something else.
    pub fn reported(&self) -> Result<Option<Vec<u8>>, Mismatch> {
        const EXPEL: &str = "expel that worker and start it again";
        let received = self.link.try_receive();
        let lost = |error: &dyn std::fmt::Display| Mismatch::new("report", error, "residency", EXPEL);
        let Some(received) = received.map_err(|error| lost(&error))? else {
            return Ok(None);
        };
        if !matches!(received.read(), Ok(WorkerSays::Residency)) {
            return Err(lost(&"something else"));
        }
        let parcel = received.descriptors.first().ok_or_else(|| lost(&"no parcel"))?;
        let residency = unpack(parcel, RESIDENCY_BYTES_MAX);
        residency.map(Some).map_err(|error| lost(&error))
    }

    /// Tells the worker to finish what it has and to attach anew.
    ///
    /// # Errors
    /// [`LinkError`] where it is gone meanwhile.
    pub fn drain(&self, reason: &str) -> Result<(), LinkError> {
        self.link.send(&ProducerSays::Drain { reason: reason.into() }, &[])
    }

    /// The connection, once the worker is adopted.
    pub fn into_link(self) -> (Link, Proof) {
        (self.link, self.proof)
    }
}

/// What became of the calls.
#[derive(Debug, Default)]
pub struct Reunion {
    /// Workers that answered, by rank.
    pub survived: Vec<Survived>,
    /// Workers that live but cannot be taken over: what they may touch stays quarantined.
    pub unusable: Vec<(Rank, Mismatch)>,
    /// Workers that live, by their lock, but did not answer in time.
    pub silent: Vec<(Rank, Holder)>,
}

impl Reunion {
    /// Splits those that answered: the workers of the latest incarnation of one channel, which can be taken over warm,
    /// and the others, which must drain. `None` where nobody answered: the start is cold.
    pub fn latest(survived: Vec<Survived>) -> Option<(ChannelId, Incarnation, Vec<Survived>, Vec<Survived>)> {
        let latest = survived
            .iter()
            .max_by_key(|one| (one.surviving.incarnation, one.surviving.rank))?;
        let (channel, incarnation) = (latest.surviving.channel, latest.surviving.incarnation);
        let of_latest = |one: &Survived| one.surviving.channel == channel && one.surviving.incarnation == incarnation;
        let (latest, older) = survived.into_iter().partition(of_latest);
        Some((channel, incarnation, latest, older))
    }
}

enum State {
    /// Its queue is full.
    Knocking,
    Waiting(Link),
}

/// A new producer that waits for the workers' answers. It holds `producer.lock`.
pub struct Takeover {
    dir: ChannelDir,
    call: Call,
    waiting: Vec<(Rank, State)>,
    until_ns: u64,
    reunion: Reunion,
}

impl Takeover {
    /// Calls on every worker that has a socket or a lock in the channel's folder.
    ///
    /// # Errors
    /// [`TakeoverError`] where the folder cannot be read.
    pub fn start(lock: &RoleLock, call: Call, now_ns: u64, patience_ns: u64) -> Result<Self, TakeoverError> {
        let dir = lock.dir().clone();
        let mut roles = dir.roles("sock")?;
        roles.extend(dir.roles("lock")?);
        roles.sort_unstable();
        roles.dedup();
        let ranks = roles.into_iter().filter_map(|role| match role {
            Role::Rank(rank) => Some((rank, State::Knocking)),
            Role::Producer => None,
        });
        Ok(Self {
            waiting: ranks.collect(),
            dir,
            call,
            until_ns: now_ns.saturating_add(patience_ns),
            reunion: Reunion::default(),
        })
    }

    /// The connections that an answer may come on.
    pub fn ready(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().filter_map(|(_, state)| match state {
            State::Knocking => None,
            State::Waiting(link) => Some(link.as_fd()),
        })
    }

    /// Takes every step that can be taken without waiting. True once nobody is waited for any more: at once where no
    /// worker lives.
    pub fn poll(&mut self, now_ns: u64) -> bool {
        let mut still = Vec::new();
        for (rank, state) in std::mem::take(&mut self.waiting) {
            match self.step(rank, state) {
                Some(state) if now_ns < self.until_ns => still.push((rank, state)),
                Some(_) => self.give_up(rank),
                None => {}
            }
        }
        self.waiting = still;
        self.waiting.is_empty()
    }

    /// What became of the calls. Whoever is still waited for counts as silent.
    pub fn finish(mut self) -> Reunion {
        for (rank, _) in std::mem::take(&mut self.waiting) {
            self.give_up(rank);
        }
        self.reunion
    }

    fn step(&mut self, rank: Rank, state: State) -> Option<State> {
        let link = match state {
            State::Waiting(link) => link,
            State::Knocking => match Link::connect(&self.dir, Role::Rank(rank)) {
                Ok(link) => match link.send(&ProducerSays::Takeover(self.call.clone()), &[]) {
                    Ok(()) => link,
                    Err(_) => return None,
                },
                Err(LinkError::Busy { .. }) => return Some(State::Knocking),
                // Nobody listens there: the worker is dead, or its lock says otherwise.
                Err(_) => {
                    self.give_up(rank);
                    return None;
                }
            },
        };
        match link.try_receive() {
            Ok(None) => return Some(State::Waiting(link)),
            Ok(Some(received)) => match self.answer(rank, link, received) {
                Ok(survived) => self.reunion.survived.extend(survived),
                Err(mismatch) => self.reunion.unusable.push((rank, mismatch)),
            },
            Err(LinkError::HungUp) => self.give_up(rank),
            Err(error) => {
                let mismatch = Mismatch::new("answer", &error, "surviving", "expel that worker");
                self.reunion.unusable.push((rank, mismatch));
            }
        }
        None
    }

    fn answer(&self, rank: Rank, link: Link, received: Received) -> Result<Option<Survived>, Mismatch> {
        const EXPEL: &str = "expel that worker and start it again";
        let surviving = match received.read() {
            Ok(WorkerSays::Surviving(surviving)) => surviving,
            Ok(WorkerSays::NothingHeld) => return Ok(None),
            Ok(WorkerSays::Refused(mismatch)) => return Err(mismatch),
            Ok(_) => return Err(Mismatch::new("answer", "something else", "surviving", EXPEL)),
            Err(error) => return Err(Mismatch::new("answer", error, "surviving", EXPEL)),
        };
        if surviving.rank != rank {
            return Err(Mismatch::new("rank", surviving.rank, rank, EXPEL));
        }
        let mut peer = link
            .peer()
            .map_err(|error| Mismatch::new("peer", error, "a live process", EXPEL))?;
        if !self.dir.peers().allows(peer.uid) {
            return Err(Mismatch::new(
                "worker's user",
                peer.uid,
                self.dir.peers(),
                "allow that user: --allow-uid",
            ));
        }
        let proof = Proof::of(&mut peer, &self.dir, Role::Rank(rank), surviving.worker_epoch)?;
        let found = received.descriptors.len();
        let Ok([control, pool, own]) = <[OwnedFd; 3]>::try_from(received.descriptors) else {
            return Err(Mismatch::new("descriptors", found, 3, EXPEL));
        };
        Ok(Some(Survived {
            surviving,
            proof,
            control,
            pool,
            rank: own,
            link,
        }))
    }

    /// A worker that gave no answer: if its lock is held, it lives.
    fn give_up(&mut self, rank: Rank) {
        let watch = LockWatch::open(&self.dir, Role::Rank(rank), None);
        if let Some(holder) = watch.ok().flatten().and_then(|watch| watch.holder().ok().flatten()) {
            self.reunion.silent.push((rank, holder));
        }
    }
}
