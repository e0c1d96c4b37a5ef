//! Both sides of attaching in one process, and what each test of them begins with.

mod joining;
mod takeover;

use std::path::Path;
use std::time::Duration;

use kvsluice_layout::segment::SegmentKind;
use serde_json::json;

use super::*;
use crate::link::{Listener, Peer};
use crate::lock::RoleLock;
use crate::names::{ChannelName, Role};
use crate::peers::Peers;
use crate::runtime_dir::{ChannelDir, RuntimeDir};
use crate::segment::{Created, Memfd, Mode, NewSegment, Reserve, create, reopen_read_only};

const HASH: u64 = 0x1a40;
const PATIENCE_NS: u64 = 5_000_000_000;

fn channel(folder: &Path, peers: &Peers) -> ChannelDir {
    let runtime = RuntimeDir::open(folder, peers).unwrap();
    runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
}

fn lock(dir: &ChannelDir, role: Role, epoch: u64) -> RoleLock {
    RoleLock::acquire(dir, role, ProcessEpoch(epoch), Duration::ZERO).unwrap()
}

fn make(kind: SegmentKind, epoch: u64) -> Created {
    let segment = NewSegment {
        kind,
        bytes: 4096,
        layout_hash: HASH,
        channel: ChannelId(0xc4),
        creator_epoch: ProcessEpoch(epoch),
    };
    let created = create(&Memfd { hardened: false }, &segment, &Reserve::default()).unwrap();
    created.make_ready();
    created
}

/// A producer as far as attaching goes.
struct Producer {
    reception: Reception,
    admission: Host,
    lock: RoleLock,
}

struct Host {
    epoch: u64,
    control: Created,
    pool: Created,
    refuse: Option<Mismatch>,
    /// Hands out the control segment in place of the pool.
    mixed_up: bool,
}

impl Admission for Host {
    fn admit(&mut self, hello: &Hello, peer: &Peer) -> Result<Admitted, Mismatch> {
        assert!(peer.pid.is_some() && peer.reliable);
        if let Some(refuse) = self.refuse.clone() {
            return Err(refuse);
        }
        let welcome = Welcome {
            protocol: PROTOCOL,
            channel: ChannelId(0xc4),
            incarnation: Incarnation(3),
            producer_epoch: ProcessEpoch(self.epoch),
            ranks: 4,
            ring_lines: 1024,
            writeback_bytes: 1 << 20,
            mode: Mode::Memfd,
            pool_generation: PoolGeneration(1),
            capability: json!({ "agreed": "everything" }),
        };
        let pool = if self.mixed_up { &self.control } else { &self.pool };
        Ok(Admitted {
            welcome,
            control: reopen_read_only(&self.control.descriptor).unwrap(),
            pool: reopen_read_only(&pool.descriptor).unwrap(),
            rank: make(SegmentKind::Rank(hello.rank), self.epoch).hand_over().unwrap().0,
        })
    }
}

impl Producer {
    fn start(dir: &ChannelDir, epoch: u64, limits: Limits) -> Self {
        let lock = lock(dir, Role::Producer, epoch);
        Self {
            reception: Reception::new(Listener::bind(&lock).unwrap(), HASH, 4, limits).unwrap(),
            admission: Host {
                epoch,
                control: make(SegmentKind::Control, epoch),
                pool: make(SegmentKind::Pool, epoch),
                refuse: None,
                mixed_up: false,
            },
            lock,
        }
    }

    fn poll(&mut self, now_ns: u64) -> Vec<Arrival> {
        self.reception.poll(now_ns, &mut self.admission).unwrap()
    }
}

fn hello(rank: u32, epoch: u64) -> Hello {
    Hello {
        protocol: PROTOCOL,
        layout_hash: HASH,
        rank: Rank(rank),
        worker_epoch: ProcessEpoch(epoch),
        pid: std::process::id(),
        capability: json!({ "device": "host" }),
    }
}
