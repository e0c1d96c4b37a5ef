//! The worker's side of a takeover: a door for the next producer, open for as long as the worker lives (X25).

use std::os::fd::{AsFd, BorrowedFd};

use kvsluice_layout::ids::{Incarnation, ProcessEpoch};

use super::porch::{Guest, Limits, Next, Porch, Turned};
use super::{Call, Envelope, Mismatch, PROTOCOL, ProducerSays, Surviving, WorkerSays};
use crate::death;
use crate::link::{Link, LinkError, Listener, Received};
use crate::liveness::Proof;
use crate::names::Role;
use crate::parcel::pack;
use crate::runtime_dir::ChannelDir;

/// What a worker hands to the next producer.
pub struct Holdings<'a> {
    /// Who it is and whom it worked for.
    pub surviving: Surviving,
    /// The control segment.
    pub control: BorrowedFd<'a>,
    /// The pool.
    pub pool: BorrowedFd<'a>,
    /// The worker's own segment.
    pub rank: BorrowedFd<'a>,
}

/// What a worker decides when a new producer calls.
pub trait SurvivorState {
    /// What the worker holds; `None` where it waits to attach, or is the caller's own by now. The caller has
    /// `producer.lock`, so the old producer is gone or is going.
    ///
    /// # Errors
    /// What speaks against it (the old producer lives), for both sides to read.
    fn holdings(&mut self, call: &Call) -> Result<Option<Holdings<'_>>, Mismatch>;

    /// What the worker knows of its device now. Asked for when the journal has drained, so that it is the last word.
    fn residency(&mut self) -> Vec<u8>;
}

/// What a new producer decided.
#[derive(Debug)]
pub enum Verdict {
    /// It takes this worker over: its records are accepted from now on.
    Adopted {
        /// The new incarnation.
        incarnation: Incarnation,
        /// The new producer's process start.
        producer_epoch: ProcessEpoch,
        /// The connection to it.
        link: Link,
        /// How its death is proven.
        producer: Proof,
    },
    /// This worker is to finish what it has and to attach anew.
    Drain {
        /// Why.
        reason: String,
    },
}

struct Caller {
    call: Call,
    proof: Proof,
}

/// The worker's door. Poll it when [`Survivor::ready`] is readable.
pub struct Survivor {
    porch: Porch<Caller>,
    layout_hash: u64,
}

impl Survivor {
    /// Opens the door.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(listener: Listener, layout_hash: u64, limits: Limits) -> Result<Self, LinkError> {
        Ok(Self {
            porch: Porch::new(listener, limits)?,
            layout_hash,
        })
    }

    /// Readable when somebody calls or speaks. Deadlines pass without it: poll every now and then as well.
    pub fn ready(&self) -> BorrowedFd<'_> {
        self.porch.ready()
    }

    /// Who was turned away.
    pub fn turned(&self) -> Turned {
        self.porch.turned()
    }

    /// Takes every step that can be taken without waiting.
    ///
    /// # Errors
    /// The system's error: this process is out of descriptors or memory.
    pub fn poll(&mut self, now_ns: u64, state: &mut impl SurvivorState) -> Result<Vec<Verdict>, LinkError> {
        let (dir, layout_hash) = (self.porch.listener().dir().clone(), self.layout_hash);
        let talk = |_: &[Guest<Caller>], guest: Guest<Caller>, received: Received| match guest.known {
            None => answer(guest, &received, &dir, layout_hash, state),
            Some(_) => conclude(guest, &received, state),
        };
        self.porch.poll(now_ns, talk, |_, _| None)
    }
}

fn answer(
    mut guest: Guest<Caller>,
    received: &Received,
    dir: &ChannelDir,
    layout_hash: u64,
    state: &mut impl SurvivorState,
) -> Next<Caller, Verdict> {
    match hand_over(&mut guest, received, dir, layout_hash, state) {
        Ok(Some(caller)) => {
            guest.known = Some(caller);
            Next::Stay(guest)
        }
        Ok(None) => {
            // It may be gone already.
            let _ = guest.link.send(&WorkerSays::NothingHeld, &[]);
            Next::Go(None)
        }
        Err(mismatch) => {
            tracing::warn!(%mismatch, "a takeover is refused");
            // It may be gone already.
            let _ = guest.link.send(&WorkerSays::Refused(mismatch), &[]);
            Next::Go(None)
        }
    }
}

fn hand_over(
    guest: &mut Guest<Caller>,
    received: &Received,
    dir: &ChannelDir,
    layout_hash: u64,
    state: &mut impl SurvivorState,
) -> Result<Option<Caller>, Mismatch> {
    const SAME_BUILD: &str = "run the same kvsluice release on both sides";
    match received.read::<Envelope>() {
        Ok(Envelope { protocol }) if protocol.major != PROTOCOL.major => return Err(Mismatch::protocol(protocol)),
        _ => {}
    }
    let Ok(ProducerSays::Takeover(call)) = received.read() else {
        return Err(Mismatch::new("first message", "something else", "takeover", SAME_BUILD));
    };
    if call.layout_hash != layout_hash {
        let (found, expected) = (format!("{:016x}", call.layout_hash), format!("{layout_hash:016x}"));
        return Err(Mismatch::new("layout hash", found, expected, SAME_BUILD));
    }
    // X25: only the holder of producer.lock is a producer.
    let proof = Proof::of(&mut guest.peer, dir, Role::Producer, call.producer_epoch)?;
    let Some(holdings) = state.holdings(&call)? else {
        return Ok(None);
    };
    let descriptors = [holdings.control, holdings.pool, holdings.rank];
    let sent = guest
        .link
        .send(&WorkerSays::Surviving(holdings.surviving), &descriptors);
    sent.map_err(|error| Mismatch::new("answer", error, "one that can be sent", "see the message"))?;
    death::point("handed-over");
    Ok(Some(Caller { call, proof }))
}

fn conclude(guest: Guest<Caller>, received: &Received, state: &mut impl SurvivorState) -> Next<Caller, Verdict> {
    let said = received.read();
    if matches!(said, Ok(ProducerSays::Report)) {
        return match report(&guest.link, &state.residency()) {
            Ok(()) => Next::Stay(guest),
            Err(error) => {
                tracing::warn!(%error, "the residency cannot be reported");
                Next::Go(None)
            }
        };
    }
    Next::Go(guest.known.and_then(|Caller { call, proof }| match said {
        // Only the one that called may adopt, under the epoch that it called with.
        Ok(ProducerSays::Adopt {
            incarnation,
            producer_epoch,
        }) if producer_epoch == call.producer_epoch => Some(Verdict::Adopted {
            incarnation,
            producer_epoch,
            link: guest.link,
            producer: proof,
        }),
        Ok(ProducerSays::Drain { reason }) => Some(Verdict::Drain { reason }),
        _ => None,
    }))
}

fn report(link: &Link, residency: &[u8]) -> Result<(), LinkError> {
    let system = |source| LinkError::System {
        step: "make a parcel",
        source,
    };
    let parcel = pack(residency).map_err(system)?;
    link.send(&WorkerSays::Residency, &[parcel.as_fd()])
}
