//! The producer's side of attaching: who knocks, whether it fits, and what it is given (X20).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::porch::{Guest, Limits, Next, Porch, Turned};
use super::{Envelope, Hello, Mismatch, PROTOCOL, ProducerSays, Welcome, WorkerSays};
use crate::link::{Link, LinkError, Listener, Peer, Received};
use crate::liveness::Proof;
use crate::names::Role;
use crate::runtime_dir::ChannelDir;

/// What the producer decides about a worker.
pub trait Admission {
    /// Looks at a worker whose protocol, layout, rank and lock are in order, and whose rank nobody else is attaching to.
    ///
    /// What is reserved for it must be given back when [`Arrival::Failed`] or [`Arrival::Left`] follows.
    ///
    /// # Errors
    /// The field that does not fit, or the worker that has the rank already; both sides get to read it.
    fn admit(&mut self, hello: &Hello, peer: &Peer) -> Result<Admitted, Mismatch>;
}

/// What an admitted worker is given.
pub struct Admitted {
    /// The producer's answer.
    pub welcome: Welcome,
    /// The control segment, for reading.
    pub control: OwnedFd,
    /// The pool, for reading.
    pub pool: OwnedFd,
    /// The rank's own segment, for writing.
    pub rank: OwnedFd,
}

/// A worker that has attached.
#[derive(Debug)]
pub struct Newcomer {
    /// What it said.
    pub hello: Hello,
    /// The connection. Its end makes the worker suspect (X23).
    pub link: Link,
    /// How its death is proven.
    pub proof: Proof,
}

/// What became of a worker that knocked.
#[derive(Debug)]
pub enum Arrival {
    /// It has opened its segments and takes part from now on.
    Attached(Box<Newcomer>),
    /// It was refused, or found itself that it does not fit.
    Failed {
        /// What it said.
        hello: Box<Hello>,
        /// What does not fit.
        mismatch: Mismatch,
        /// True where it had been admitted before.
        was_admitted: bool,
    },
    /// It was admitted and then hung up, died or said nothing more.
    Left {
        /// What it said.
        hello: Box<Hello>,
        /// How it went.
        why: LinkError,
    },
}

struct Greeted {
    hello: Hello,
    proof: Proof,
}

/// The producer's door. Poll it when [`Reception::ready`] is readable.
pub struct Reception {
    porch: Porch<Greeted>,
    layout_hash: u64,
    ranks: u32,
}

impl Reception {
    /// Opens the door for workers of `ranks` ranks.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(listener: Listener, layout_hash: u64, ranks: u32, limits: Limits) -> Result<Self, LinkError> {
        Ok(Self {
            porch: Porch::new(listener, limits)?,
            layout_hash,
            ranks,
        })
    }

    /// Readable when somebody knocks or speaks. Deadlines pass without it: poll every now and then as well.
    pub fn ready(&self) -> BorrowedFd<'_> {
        self.porch.ready()
    }

    /// Who was turned away without an event.
    pub fn turned(&self) -> Turned {
        self.porch.turned()
    }

    /// Takes every step that can be taken without waiting.
    ///
    /// # Errors
    /// The system's error: this process is out of descriptors or memory.
    pub fn poll(&mut self, now_ns: u64, admission: &mut impl Admission) -> Result<Vec<Arrival>, LinkError> {
        let (layout_hash, ranks) = (self.layout_hash, self.ranks);
        let dir = self.porch.listener().dir().clone();
        let talk = |others: &[Guest<Greeted>], guest: Guest<Greeted>, received: Received| match guest.known {
            None => greet(others, guest, &received, (&dir, layout_hash, ranks), admission),
            Some(_) => Next::Go(conclude(guest, &received)),
        };
        let gone = |guest: Guest<Greeted>, why| {
            let hello = Box::new(guest.known?.hello);
            Some(Arrival::Left { hello, why })
        };
        self.porch.poll(now_ns, talk, gone)
    }
}

/// The first message: compared field by field, and answered.
fn greet(
    others: &[Guest<Greeted>],
    mut guest: Guest<Greeted>,
    received: &Received,
    (dir, layout_hash, ranks): (&ChannelDir, u64, u32),
    admission: &mut impl Admission,
) -> Next<Greeted, Arrival> {
    let refuse = |guest: Guest<Greeted>, hello: Option<Hello>, mismatch: Mismatch| {
        // It may be gone already; the event says the same.
        let _ = guest.link.send(&ProducerSays::Refused(mismatch.clone()), &[]);
        Next::Go(hello.map(|hello| Arrival::Failed {
            hello: Box::new(hello),
            mismatch,
            was_admitted: false,
        }))
    };
    // The version before anything else: the rest of another version's message may mean other things.
    match received.read::<Envelope>() {
        Ok(Envelope { protocol }) if protocol.major != PROTOCOL.major => {
            return refuse(guest, None, Mismatch::protocol(protocol));
        }
        _ => {}
    }
    let Ok(WorkerSays::Hello(hello)) = received.read() else {
        let found = "something else";
        return refuse(
            guest,
            None,
            Mismatch::new("first message", found, "hello", "attach with `kvsluice gpu-worker`"),
        );
    };
    let admitted = check(others, &guest.peer, &hello, layout_hash, ranks).and_then(|()| {
        let proof = Proof::of(&mut guest.peer, dir, Role::Rank(hello.rank), hello.worker_epoch)?;
        Ok((admission.admit(&hello, &guest.peer)?, proof))
    });
    let (admitted, proof) = match admitted {
        Ok(admitted) => admitted,
        Err(mismatch) => return refuse(guest, Some(hello), mismatch),
    };
    let descriptors = [&admitted.control, &admitted.pool, &admitted.rank].map(AsFd::as_fd);
    if let Err(why) = guest
        .link
        .send(&ProducerSays::Welcome(Box::new(admitted.welcome)), &descriptors)
    {
        let hello = Box::new(hello);
        return Next::Go(Some(Arrival::Left { hello, why }));
    }
    guest.known = Some(Greeted { hello, proof });
    Next::Stay(guest)
}

fn check(others: &[Guest<Greeted>], peer: &Peer, hello: &Hello, layout_hash: u64, ranks: u32) -> Result<(), Mismatch> {
    const SAME_BUILD: &str = "run the same kvsluice release on both sides";
    if hello.layout_hash != layout_hash {
        let (found, expected) = (format!("{:016x}", hello.layout_hash), format!("{layout_hash:016x}"));
        return Err(Mismatch::new("layout hash", found, expected, SAME_BUILD));
    }
    if hello.rank.get() >= ranks {
        let expected = format!("0 to {}", ranks.saturating_sub(1));
        return Err(Mismatch::new(
            "rank",
            hello.rank,
            expected,
            "start one worker for each rank of the geometry",
        ));
    }
    if hello.worker_epoch.get() == 0 {
        return Err(Mismatch::new("worker epoch", 0, "a random number", SAME_BUILD));
    }
    // X23: an earlier guest may have died without its connection telling yet.
    let same_rank = |other: &&Guest<Greeted>| {
        let known = other.known.as_ref().filter(|known| known.hello.rank == hello.rank);
        known.is_some_and(|known| !known.proof.is_dead())
    };
    if let Some(first) = others.iter().find(same_rank) {
        let field = format!("worker of rank {}", hello.rank);
        let pid = peer.pid.unwrap_or(hello.pid);
        let first_pid = first.peer.pid.or(first.known.as_ref().map(|known| known.hello.pid));
        return Err(Mismatch::occupied(field, format!("pid {pid}"), first_pid));
    }
    Ok(())
}

/// The second message: the worker takes part, or says why not.
fn conclude(guest: Guest<Greeted>, received: &Received) -> Option<Arrival> {
    let Greeted { hello, proof } = guest.known?;
    match received.read() {
        Ok(WorkerSays::Attached) => Some(Arrival::Attached(Box::new(Newcomer {
            hello,
            link: guest.link,
            proof,
        }))),
        Ok(WorkerSays::Failed(mismatch)) => Some(Arrival::Failed {
            hello: Box::new(hello),
            mismatch,
            was_admitted: true,
        }),
        other => Some(Arrival::Left {
            hello: Box::new(hello),
            why: other.err().unwrap_or(LinkError::HungUp),
        }),
    }
}
