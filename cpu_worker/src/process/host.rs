//! Who lets workers in: what is agreed with each, and the segment that it gets (X20, X22, X24).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvsluice_layout::capability::{Capability, negotiate};
use kvsluice_layout::ids::{Incarnation, PoolGeneration, ProcessEpoch, Rank};
use kvsluice_layout::region::{RegionMap, layout_hash};
use kvsluice_layout::segment::SegmentKind;
use kvsluice_transport::attach::{Admission, Admitted, Hello, Mismatch, PROTOCOL, Welcome};
use kvsluice_transport::link::Peer;
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::runtime_dir::RuntimeDirError;
use kvsluice_transport::segment::{Backend, Identity, Mapping, NewSegment, Reserve, create, reopen_read_only};

use super::channel::Found;
use super::{ProcessError, system};

/// Whether a rank has a worker.
pub(super) enum Chair {
    /// None.
    Free,
    /// One was let in and has not said yet that it takes part.
    Offered(Mapping),
    /// One takes part.
    Taken,
}

/// The place of one rank.
pub(super) struct Place {
    pub(super) chair: Chair,
    /// Process of its worker, or of the last one.
    pub(super) pid: u32,
    /// Process start of that worker.
    pub(super) worker: ProcessEpoch,
    /// Its segment, which may have a name.
    pub(super) segment: Option<Identity>,
}

/// Who lets workers in.
pub(super) struct Host {
    /// Held for as long as the channel is used.
    pub(super) lock: Option<RoleLock>,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) found: Found,
    pub(super) region: RegionMap,
    pub(super) reserve: Reserve,
    pub(super) epoch: ProcessEpoch,
    pub(super) capability: Capability,
    pub(super) needs_copy: bool,
    pub(super) write_back_bytes: u64,
    pub(super) incarnation: Incarnation,
    pub(super) generation: PoolGeneration,
    pub(super) places: Vec<Place>,
}

impl Host {
    pub(super) fn with_lock(mut self, lock: RoleLock) -> Self {
        self.lock = Some(lock);
        self
    }

    /// X27: a folder or a lock file that was deleted under a live channel.
    pub(super) fn check_still_there(&self) -> Result<(), RuntimeDirError> {
        self.lock.as_ref().map_or(Ok(()), RoleLock::check_still_there)
    }

    /// What the next welcome says.
    pub(super) fn note_state(&mut self, incarnation: Incarnation, generation: PoolGeneration) {
        (self.incarnation, self.generation) = (incarnation, generation);
    }

    /// True while a worker was let in and has not said yet that it takes part.
    pub(super) fn expects_somebody(&self) -> bool {
        self.places.iter().any(|place| matches!(place.chair, Chair::Offered(_)))
    }

    /// The segment of a worker that takes part from now on.
    pub(super) fn take_admitted(&mut self, rank: Rank) -> Option<Mapping> {
        let place = self.places.get_mut(rank.index())?;
        match std::mem::replace(&mut place.chair, Chair::Taken) {
            Chair::Offered(segment) => Some(segment),
            other => {
                place.chair = other;
                None
            }
        }
    }

    /// The rank has no worker any more. `of`: only if its worker is that one.
    pub(super) fn vacate(&mut self, rank: Rank, of: Option<ProcessEpoch>) {
        let Some(place) = self.places.get_mut(rank.index()) else {
            return;
        };
        if of.is_some_and(|of| of != place.worker) {
            return;
        }
        place.chair = Chair::Free;
        if let Some(identity) = place.segment.take() {
            discard(&*self.backend, SegmentKind::Rank(rank), identity);
        }
    }

    /// Removes the names of all segments, where they have one, and gives up the role.
    pub(super) fn discard(mut self) {
        for rank in 0..self.places.len() as u32 {
            self.vacate(Rank(rank), None);
        }
        let of_producer = [
            (SegmentKind::Pool, &self.found.pool_fd),
            (SegmentKind::Control, &self.found.control_fd),
        ];
        for (segment, descriptor) in of_producer {
            if let Ok(identity) = Identity::of_descriptor(descriptor) {
                discard(&*self.backend, segment, identity);
            }
        }
    }

    fn offer(&mut self, rank: Rank, pid: u32, worker: ProcessEpoch) -> Result<Admitted, ProcessError> {
        let segment = NewSegment {
            kind: SegmentKind::Rank(rank),
            bytes: self.region.rank_bytes(),
            layout_hash: layout_hash(),
            channel: self.found.channel,
            creator_epoch: self.epoch,
        };
        // X24: every worker gets a fresh segment.
        let created = create(&*self.backend, &segment, &self.reserve)?;
        created.make_ready();
        let (descriptor, reader) = created.hand_over().map_err(system("map a rank segment"))?;
        let welcome = Welcome {
            protocol: PROTOCOL,
            channel: self.found.channel,
            incarnation: self.incarnation,
            producer_epoch: self.epoch,
            ranks: self.places.len() as u32,
            ring_lines: self.region.ring_bytes() as u64 / 64,
            writeback_bytes: self.write_back_bytes,
            mode: self.backend.mode(),
            pool_generation: self.generation,
            capability: serde_json::to_value(&self.capability).unwrap_or_default(),
        };
        let read_only = |segment: &OwnedFd| reopen_read_only(segment).map_err(system("reopen a segment read-only"));
        let admitted = Admitted {
            welcome,
            control: read_only(&self.found.control_fd)?,
            pool: read_only(&self.found.pool_fd)?,
            rank: descriptor,
        };
        if let Some(place) = self.places.get_mut(rank.index()) {
            let segment = Identity::of_descriptor(&admitted.rank).ok();
            *place = Place {
                chair: Chair::Offered(reader),
                pid,
                worker,
                segment,
            };
        }
        Ok(admitted)
    }
}

impl Admission for Host {
    fn admit(&mut self, hello: &Hello, peer: &Peer) -> Result<Admitted, Mismatch> {
        const SAME: &str = "run one release on both sides";
        let theirs = serde_json::from_value(hello.capability.clone())
            .map_err(|error| Mismatch::new("capability", error, "a capability", SAME))?;
        let agreed = negotiate(&self.capability, &theirs)
            .map_err(|error| Mismatch::new(error.field, error.theirs, error.ours, error.remedy))?;
        if self.needs_copy && !agreed.source_kinds.copy {
            let remedy = "give every group a gather region, or use source-only";
            return Err(Mismatch::new("source_kinds", "no copy", "copy", remedy)); // R22
        }
        let pid = peer.pid.unwrap_or(hello.pid);
        // One that was offered the rank before has died, or the door would not have asked (X23).
        if self
            .places
            .get(hello.rank.index())
            .is_some_and(|place| matches!(place.chair, Chair::Offered(_)))
        {
            self.vacate(hello.rank, None);
        }
        let place = self.places.get(hello.rank.index());
        if let Some(place) = place.filter(|place| !matches!(place.chair, Chair::Free)) {
            let field = format!("worker of rank {}", hello.rank);
            return Err(Mismatch::occupied(field, format!("pid {pid}"), Some(place.pid)));
        }
        self.offer(hello.rank, pid, hello.worker_epoch)
            .map_err(|error| Mismatch::new("rank segment", error, "one that can be made", "see the message"))
    }
}

fn discard(backend: &dyn Backend, segment: SegmentKind, identity: Identity) {
    if let Err(error) = backend.discard(segment, identity) {
        tracing::warn!(%segment, %error, "a named segment stays");
    }
}
