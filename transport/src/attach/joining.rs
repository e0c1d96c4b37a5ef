//! The worker's side of attaching (X20).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use kvsluice_layout::segment::SegmentKind;

use super::{Envelope, Hello, Mismatch, PROTOCOL, ProducerSays, Welcome, WorkerSays};
use crate::clock::Clock;
use crate::death;
use crate::link::{Link, LinkError, Received};
use crate::liveness::{Proof, has_left};
use crate::lock::RoleLock;
use crate::names::Role;
use crate::runtime_dir::ChannelDir;
use crate::segment::{Mapping, MappingMut, OpenError, Wanted, open_reader, open_writer};

/// Why a worker could not attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no producer, or none that listens.
    #[error("channel {channel} has no producer: nobody listens on {path}; start `kvsluice cpu-worker` for it")]
    NoProducer {
        /// The channel.
        channel: String,
        /// The producer's socket.
        path: std::path::PathBuf,
    },
    /// The producer says that this worker does not fit.
    #[error("the producer of channel {channel} refuses this worker: {mismatch}")]
    Refused {
        /// The channel.
        channel: String,
        /// What does not fit, in the producer's words: `found` is this worker's.
        mismatch: Mismatch,
    },
    /// This worker found that the producer does not fit.
    #[error("the producer of channel {channel} does not fit this worker: {mismatch}")]
    Unfit {
        /// The channel.
        channel: String,
        /// What does not fit: `found` is the producer's.
        mismatch: Mismatch,
    },
    /// The producer listens but does not answer in time.
    #[error("the producer of channel {channel} does not answer within {waited_ms} ms; it may be stopped or overloaded")]
    NoAnswer {
        /// The channel.
        channel: String,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// The connection failed.
    #[error("attaching to channel {channel}: {source}")]
    Link {
        /// The channel.
        channel: String,
        /// What failed.
        source: LinkError,
    },
}

/// A worker that waits for the producer's answer.
#[derive(Debug)]
pub struct Joining {
    dir: ChannelDir,
    hello: Hello,
    /// `None` while the producer's queue is full.
    link: Option<Link>,
    since_ns: u64,
    until_ns: u64,
}

impl Joining {
    /// Knocks. The worker holds the lock of its rank, which `lock` proves.
    ///
    /// # Errors
    /// [`AttachError::NoProducer`] at once where nobody listens: the caller decides whether to wait for one.
    pub fn start(lock: &RoleLock, hello: Hello, now_ns: u64, patience_ns: u64) -> Result<Self, AttachError> {
        let mut joining = Self {
            dir: lock.dir().clone(),
            hello,
            link: None,
            since_ns: now_ns,
            until_ns: now_ns.saturating_add(patience_ns),
        };
        joining.knock()?;
        Ok(joining)
    }

    /// The connection, readable when there is an answer; `None` while the producer's queue is full.
    pub fn ready(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Takes every step that can be taken without waiting. `None`: no answer yet.
    ///
    /// # Errors
    /// [`AttachError`]; the attempt is over then.
    pub fn poll(&mut self, now_ns: u64) -> Result<Option<Offer>, AttachError> {
        self.knock()?;
        let received = match self.link.as_ref().map(Link::try_receive) {
            Some(Ok(Some(received))) => received,
            Some(Err(source)) => return Err(self.failed(source)),
            _ if now_ns < self.until_ns => return Ok(None),
            _ => {
                return Err(AttachError::NoAnswer {
                    channel: self.dir.name().to_string(),
                    waited_ms: now_ns.saturating_sub(self.since_ns) / 1_000_000,
                });
            }
        };
        let link = self.link.take().ok_or_else(|| self.failed(LinkError::HungUp))?;
        self.answer(link, received).map(Some)
    }

    /// Waits for the answer. For processes that have nothing else to do meanwhile.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn wait(mut self, clock: &dyn Clock) -> Result<Offer, AttachError> {
        loop {
            if let Some(offer) = self.poll(clock.now_ns())? {
                return Ok(offer);
            }
            // Short, because a full queue is only seen by knocking again.
            let timeout = rustix::event::Timespec::try_from(Duration::from_millis(20)).ok();
            let watched = self
                .ready()
                .map(|link| rustix::event::PollFd::from_borrowed_fd(link, rustix::event::PollFlags::IN));
            let _ = rustix::event::poll(&mut Vec::from_iter(watched), timeout.as_ref());
        }
    }

    fn knock(&mut self) -> Result<(), AttachError> {
        if self.link.is_some() {
            return Ok(());
        }
        let link = match Link::connect(&self.dir, Role::Producer) {
            Err(LinkError::Busy { .. }) => return Ok(()),
            Err(LinkError::Nobody { path }) => {
                return Err(AttachError::NoProducer {
                    channel: self.dir.name().to_string(),
                    path,
                });
            }
            link => link.map_err(|source| self.failed(source))?,
        };
        link.send(&WorkerSays::Hello(self.hello.clone()), &[])
            .map_err(|source| self.failed(source))?;
        self.link = Some(link);
        Ok(())
    }

    fn answer(&self, link: Link, received: Received) -> Result<Offer, AttachError> {
        let channel = || self.dir.name().to_string();
        let unfit = |mismatch: Mismatch| {
            // Both sides get to know it.
            let _ = link.send(&WorkerSays::Failed(mismatch.clone()), &[]);
            AttachError::Unfit {
                channel: channel(),
                mismatch,
            }
        };
        // X20: whose descriptors these are is the kernel's word, not the sender's.
        let mut peer = link.peer().map_err(|source| self.failed(source))?;
        if !self.dir.peers().allows(peer.uid) {
            let found = format!("uid {}", peer.uid);
            return Err(unfit(Mismatch::new(
                "producer's user",
                found,
                self.dir.peers(),
                "allow that user: --allow-uid",
            )));
        }
        let welcome = match received.read() {
            Ok(ProducerSays::Welcome(welcome)) => *welcome,
            Ok(ProducerSays::Refused(mismatch)) => {
                return Err(AttachError::Refused {
                    channel: channel(),
                    mismatch,
                });
            }
            Ok(_) => {
                return Err(unfit(Mismatch::new(
                    "answer",
                    "something else",
                    "welcome",
                    "restart the producer",
                )));
            }
            Err(error) => {
                // Perhaps a version that says it otherwise.
                return Err(match received.read::<Envelope>() {
                    Ok(Envelope { protocol }) if protocol.major != PROTOCOL.major => {
                        unfit(Mismatch::protocol(protocol))
                    }
                    _ => self.failed(error),
                });
            }
        };
        if welcome.protocol.major != PROTOCOL.major {
            return Err(unfit(Mismatch::protocol(welcome.protocol)));
        }
        if self.hello.rank.get() >= welcome.ranks {
            let remedy = "start one worker for each rank of the geometry";
            return Err(unfit(Mismatch::new(
                "ranks",
                welcome.ranks,
                format!("more than {}", self.hello.rank),
                remedy,
            )));
        }
        let found = received.descriptors.len();
        let Ok([control, pool, rank]) = <[OwnedFd; 3]>::try_from(received.descriptors) else {
            return Err(unfit(Mismatch::new(
                "descriptors",
                found,
                3,
                "run the same kvsluice release on both sides",
            )));
        };
        let producer = match Proof::of(&mut peer, &self.dir, Role::Producer, welcome.producer_epoch) {
            Ok(producer) => producer,
            // It died behind its welcome: not one that does not fit, but none.
            Err(_) if has_left(&self.dir, Role::Producer, welcome.producer_epoch) => {
                return Err(self.failed(LinkError::HungUp));
            }
            Err(mismatch) => return Err(unfit(mismatch)),
        };
        Ok(Offer {
            dir: self.dir.clone(),
            hello: self.hello.clone(),
            welcome,
            producer,
            control,
            pool,
            rank,
            link,
        })
    }

    fn failed(&self, source: LinkError) -> AttachError {
        AttachError::Link {
            channel: self.dir.name().to_string(),
            source,
        }
    }
}

/// A producer's welcome, to be looked at: accept it or say what does not fit.
#[derive(Debug)]
pub struct Offer {
    dir: ChannelDir,
    hello: Hello,
    /// What the producer said.
    pub welcome: Welcome,
    /// How the producer's death is proven.
    pub producer: Proof,
    /// The control segment, for reading. Kept for a later producer (X25).
    pub control: OwnedFd,
    /// The pool, for reading. Kept for a later producer.
    pub pool: OwnedFd,
    /// The rank's own segment.
    pub rank: OwnedFd,
    link: Link,
}

/// The segments of an attached worker, mapped as far as its role allows.
pub struct Segments {
    /// Written by the producer.
    pub control: Mapping,
    /// Written by the producer.
    pub pool: Mapping,
    /// Written by this worker.
    pub rank: MappingMut,
}

impl Offer {
    /// Checks and maps the three segments (X3, X3a).
    ///
    /// # Errors
    /// The field that does not fit, for [`Self::decline`].
    pub fn open(&self) -> Result<Segments, Mismatch> {
        let wanted = |kind, creator_epoch| Wanted {
            kind,
            mode: self.welcome.mode,
            layout_hash: self.hello.layout_hash,
            channel: Some(self.welcome.channel),
            creator_epoch,
            peers: self.dir.peers(),
        };
        // Control and pool may be an earlier producer's; a rank's segment is always made for this attach (X24).
        let of_rank = wanted(SegmentKind::Rank(self.hello.rank), Some(self.welcome.producer_epoch));
        Ok(Segments {
            control: open_reader(&self.control, &wanted(SegmentKind::Control, None)).map_err(mismatch)?,
            pool: open_reader(&self.pool, &wanted(SegmentKind::Pool, None)).map_err(mismatch)?,
            rank: open_writer(&self.rank, &of_rank).map_err(mismatch)?,
        })
    }

    /// Tells the producer that this worker takes part. Keep the connection: its end makes this worker suspect (X23).
    ///
    /// # Errors
    /// [`AttachError::Link`] where the producer is gone meanwhile.
    pub fn accept(self) -> Result<Accepted, AttachError> {
        if let Err(source) = self.link.send(&WorkerSays::Attached, &[]) {
            return Err(AttachError::Link {
                channel: self.dir.name().to_string(),
                source,
            });
        }
        death::point("attached");
        Ok(Accepted {
            welcome: self.welcome,
            producer: self.producer,
            control: self.control,
            pool: self.pool,
            rank: self.rank,
            link: self.link,
        })
    }

    /// Tells the producer what does not fit, and returns it as this side's error (X20).
    pub fn decline(self, mismatch: Mismatch) -> AttachError {
        // It may be gone already.
        let _ = self.link.send(&WorkerSays::Failed(mismatch.clone()), &[]);
        AttachError::Unfit {
            channel: self.dir.name().to_string(),
            mismatch,
        }
    }
}

/// What an attached worker keeps.
#[derive(Debug)]
pub struct Accepted {
    /// What the producer said.
    pub welcome: Welcome,
    /// How the producer's death is proven.
    pub producer: Proof,
    /// The control segment, for a later producer (X25).
    pub control: OwnedFd,
    /// The pool, for a later producer.
    pub pool: OwnedFd,
    /// The rank's own segment, for a later producer.
    pub rank: OwnedFd,
    /// The connection to the producer.
    pub link: Link,
}

/// A segment that cannot be opened, as a message to the one who handed it over.
pub(super) fn mismatch(error: OpenError) -> Mismatch {
    match error {
        OpenError::Refused(refused) => {
            let field = format!("{} of the {} segment", refused.field, refused.segment);
            Mismatch::new(field, refused.found, refused.expected, refused.remedy)
        }
        error => Mismatch::new("segment", &error, "one that can be mapped", "see the message"),
    }
}
