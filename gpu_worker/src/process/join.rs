//! From the first hello to a rank with an open device (X20, X24, X31).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvsluice_layout::capability::{Capability, CapabilityError, SelectionUnit, SourceKinds, negotiate};
use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{RegionMap, layout_hash};
use kvsluice_transport::attach::{
    Accepted, AttachError, Call, Hello, Holdings, Joining, Mismatch, Offer, PROTOCOL, Segments, Survivor, SurvivorState,
};
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::members::read_member;
use kvsluice_transport::segment::Mapping;
use kvsluice_transport::shared::Shared;

use super::{ProcessError, WorkerOptions};
use crate::copy::{HostPool, pool_chunk_ends};
use crate::device::adversary::Adversary;
use crate::device::host::HostDevice;
use crate::device::{Access, Device, DeviceSpec, HostSpan};
use crate::tables::{TableLimits, TableStore};
use crate::worker::{Verifier, WorkerSpec};

/// Bytes of the private buffer that verification reads into.
const VERIFY_BYTES: usize = 4 << 20;

/// The door of a worker that has not attached: it holds nothing that a producer could take over, and says so at once
/// rather than letting the producer wait for it.
pub(super) struct NothingHeld;

impl SurvivorState for NothingHeld {
    fn holdings(&mut self, _: &Call) -> Result<Option<Holdings<'_>>, Mismatch> {
        Ok(None)
    }

    fn residency(&mut self) -> Vec<u8> {
        Vec::new() // nobody is handed anything, so nobody asks
    }
}

/// What this build can do with a geometry: copy needs a gather region in every group.
pub(super) fn source_kinds(map: &GeometryMap) -> SourceKinds {
    let copy = map.geometry().groups.iter().all(|group| group.gather_blocks > 0);
    SourceKinds {
        source_only: true,
        copy,
    }
}

pub(super) fn join(
    options: &WorkerOptions,
    lock: &RoleLock,
    epoch: ProcessEpoch,
    survivor: &mut Survivor,
    stop: &AtomicBool,
    (clock, until_ns): (&Monotonic, u64),
) -> Result<Offer, ProcessError> {
    let map = GeometryMap::new(&options.geometry)?;
    let capability = Capability::of(&options.geometry, SelectionUnit::Block, source_kinds(&map), epoch);
    loop {
        survivor.poll(clock.now_ns(), &mut NothingHeld)?;
        let hello = Hello {
            protocol: PROTOCOL,
            layout_hash: layout_hash(),
            rank: options.rank,
            worker_epoch: epoch,
            pid: std::process::id(),
            capability: serde_json::to_value(&capability).unwrap_or_default(),
        };
        let left_ns = until_ns.saturating_sub(clock.now_ns());
        let joined = Joining::start(lock, hello, clock.now_ns(), left_ns).and_then(|joining| joining.wait(clock));
        match joined {
            // The two sides may be started in any order.
            Err(AttachError::NoProducer { .. }) if clock.now_ns() < until_ns && !stop.load(Ordering::Relaxed) => {
                std::thread::sleep(Duration::from_millis(2));
                lock.check_still_there().map_err(ProcessError::Gone)?;
            }
            joined => return Ok(joined?),
        }
    }
}

/// Checks that the producer's welcome fits this worker, field by field, and maps the segments.
pub(super) fn fit(
    options: &WorkerOptions,
    offer: Offer,
    map: &GeometryMap,
    epoch: ProcessEpoch,
) -> Result<(Offer, Segments, RegionMap), ProcessError> {
    let checked = (|| {
        let theirs = serde_json::from_value(offer.welcome.capability.clone())
            .map_err(|error| Mismatch::new("capability", error, "a capability", "run one release on both sides"))?;
        let ours = Capability::of(&options.geometry, SelectionUnit::Block, source_kinds(map), epoch);
        negotiate(&ours, &theirs)
            .map_err(|error: CapabilityError| Mismatch::new(error.field, error.theirs, error.ours, error.remedy))?;
        let slot_bytes = map.writeback_slot_bytes();
        let slots = offer.welcome.writeback_bytes / slot_bytes.max(1);
        let ring = offer.welcome.ring_lines.saturating_mul(64);
        let regions = RegionMap::new(&options.geometry, ring as usize, slots as usize, slot_bytes as usize)
            .map_err(|error| Mismatch::new("ring lines", offer.welcome.ring_lines, error, "ask for another ring"))?;
        let segments = offer.open()?;
        let sizes = [
            ("control bytes", segments.control.size(), regions.control_bytes()),
            ("pool bytes", segments.pool.size(), map.pool_bytes() as usize),
            ("rank bytes", segments.rank.size(), regions.rank_bytes()),
        ];
        for (field, found, least) in sizes {
            if found < least {
                let remedy = "both sides must derive equal sizes from one geometry";
                return Err(Mismatch::new(field, found, format!("at least {least}"), remedy));
            }
        }
        Ok((segments, regions))
    })();
    match checked {
        Ok((segments, regions)) => Ok((offer, segments, regions)),
        Err(mismatch) => Err(offer.decline(mismatch).into()),
    }
}

pub(super) struct Opened {
    pub(super) device: HostDevice,
    pub(super) spec: WorkerSpec,
}

pub(super) fn open_device(
    options: &WorkerOptions,
    map: &GeometryMap,
    segments: &Segments,
    regions: &RegionMap,
) -> Result<Opened, ProcessError> {
    let blocks_max = map
        .geometry()
        .groups
        .iter()
        .map(|group| group.device_blocks)
        .max()
        .unwrap_or(1);
    let tables = TableLimits {
        requests_max: options.requests_max,
        blocks_max,
    };
    let spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(map, tables).spec());
    let adversary = options.adversary.map_or_else(Adversary::default, |seed| {
        // Each rank has its own order of events.
        Adversary::late(seed ^ u64::from(options.rank.0) << 32)
    });
    let mut device = HostDevice::open(spec, options.copy_threads.max(1), adversary)?;
    let ends = pool_chunk_ends(map, options.chunk_bytes_max)?;
    let pool_bytes = ends.last().copied().unwrap_or(0);
    let base = segments.pool.base_ptr().cast_mut();
    // SAFETY: `Process` keeps the mapping until after the worker, and with it the device, is dropped; `fit` has checked
    // its size against the geometry; a read-only span is never written.
    let span = unsafe { HostSpan::new(base, pool_bytes, Access::ReadOnly) };
    let pool = HostPool::new(device.register_all(span, &ends)?, &ends);
    let slots = regions.write_back_slots() as u64;
    let slot_bytes = regions.write_back_slot_bytes() as u64;
    let write_back = match regions.write_back_at(0) {
        Some(at) => {
            let ends = [slots * slot_bytes];
            // SAFETY: the area lies inside the rank's segment, whose size `fit` has checked and whose mapping `Process`
            // keeps until after the device; only the device and this process's atomics touch it.
            let span = unsafe { HostSpan::new(segments.rank.base_mut_ptr().add(at), ends[0], Access::ReadWrite) };
            Some(HostPool::new(device.register_all(span, &ends)?, &ends))
        }
        None => None,
    };
    let verifier = Verifier::new(options.verify, &mut device, VERIFY_BYTES)?;
    let spec = WorkerSpec {
        rank: options.rank,
        pool,
        write_back,
        write_back_slots: (slots, slot_bytes),
        tables,
        verifier,
        watchdog_ns: options.watchdog.as_nanos() as u64,
    };
    Ok(Opened { device, spec })
}

/// Waits until the producer has put this worker at its rank (X24), and returns the first record that it answers.
pub(super) fn seat(
    control: &Mapping,
    regions: &RegionMap,
    rank: Rank,
    epoch: ProcessEpoch,
    accepted: &Accepted,
    stop: &AtomicBool,
) -> Result<Position, ProcessError> {
    loop {
        let member = read_member(control, regions, rank);
        if member.epoch == epoch {
            return Ok(member.first);
        }
        if stop.load(Ordering::Relaxed) {
            return Err(ProcessError::Stopped);
        }
        if accepted.producer.is_dead() {
            return Err(ProcessError::ProducerGone);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}
