//! The channel's segments: made, taken over from a dead producer, or found by their names (X21, X24–X26).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds, geometry_hash};
use kvsluice_layout::charter::Charter;
use kvsluice_layout::ids::{ChannelId, Incarnation, MAX_RANKS, PoolGeneration, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{RegionMap, layout_hash};
use kvsluice_layout::segment::{HEADER_BYTES, SegmentHeader, SegmentKind};
use kvsluice_transport::attach::{Call, PROTOCOL, Reunion, Survived, Takeover};
use kvsluice_transport::charter::{read_charter, write_charter};
use kvsluice_transport::clock::Clock;
use kvsluice_transport::lock::{Holder, RoleLock};
use kvsluice_transport::members::read_member;
use kvsluice_transport::peers::Peers;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::segment::{
    Backend, Identity, Mapping, MappingMut, Memfd, Mode, NewSegment, Persistent, Reserve, Wanted, create, open_reader,
    open_writer, reopen_writable,
};
use kvsluice_transport::shared::Shared;

use super::host::{Chair, Host, Place};
use super::{OnRankLost, ProcessError, ProducerOptions, Residence, STARTS_COLD, random, system};
use crate::rounds::Sources;
use crate::store::HostStore;

/// What a producer begins with.
pub(super) struct Opened {
    pub(super) host: Host,
    pub(super) producer: Producer<MappingMut, Mapping>,
    pub(super) store: HostStore<MappingMut, MappingMut>,
    pub(super) control: MappingMut,
    /// Workers of a dead producer, to be adopted.
    pub(super) survivors: Vec<Survivor>,
    /// The channel was not made but found.
    pub(super) recovered: bool,
}

/// A worker that outlived its producer, with its segment.
pub(super) struct Survivor {
    pub(super) survived: Survived,
    pub(super) segment: Mapping,
}

/// A rank with a worker: its process, its process start, its segment.
type Seated = (Rank, u32, ProcessEpoch, Option<Identity>);

/// What is known before any segment is.
struct Ground<'a> {
    options: &'a ProducerOptions,
    epoch: ProcessEpoch,
    map: Arc<GeometryMap>,
    region: RegionMap,
    peers: Peers,
}

/// The two segments that the producer writes.
pub(super) struct Found {
    pub(super) channel: ChannelId,
    pub(super) control_fd: OwnedFd,
    pub(super) pool_fd: OwnedFd,
    pub(super) control: MappingMut,
    pub(super) pool: MappingMut,
}

/// Takes over what a dead producer left, where that can be done, else makes a new channel. The caller holds the lock.
pub(super) fn open(
    options: &ProducerOptions,
    lock: &RoleLock,
    epoch: ProcessEpoch,
    map: Arc<GeometryMap>,
    region: RegionMap,
    clock: &dyn Clock,
) -> Result<Opened, ProcessError> {
    let named = match &options.residence {
        Residence::Persistent(folder) => Some(Arc::new(Persistent::open(folder, lock.dir().name().clone())?)),
        Residence::Memfd | Residence::Hardened => None,
    };
    let opened = find_or_make(options, lock, epoch, (map, region), clock, named.as_ref())?;
    if let Some(named) = &named {
        // X24: the segment of a rank that died with its producer is never used again, and its name is in the way.
        let seated = |segment: &SegmentKind| {
            let mut ranks = opened.survivors.iter().map(|one| one.survived.surviving.rank);
            ranks.any(|rank| *segment == SegmentKind::Rank(rank))
        };
        remove_named(named, rank_segments().filter(|segment| !seated(segment)))?;
    }
    Ok(opened)
}

fn find_or_make(
    options: &ProducerOptions,
    lock: &RoleLock,
    epoch: ProcessEpoch,
    (map, region): (Arc<GeometryMap>, RegionMap),
    clock: &dyn Clock,
    named: Option<&Arc<Persistent>>,
) -> Result<Opened, ProcessError> {
    let backend: Arc<dyn Backend> = match named {
        Some(named) => named.clone(),
        None => Arc::new(Memfd {
            hardened: options.residence == Residence::Hardened,
        }),
    };
    let ground = Ground {
        options,
        epoch,
        map,
        region,
        peers: lock.dir().peers().clone(),
    };
    let mut reunion = call_survivors(lock, epoch, options.takeover_patience_ms, clock)?;
    // X23: a worker that lives and is only slow or stopped is waited for, where the channel is to outlive such things.
    let until_ns = clock.now_ns() + options.attach_patience_ms.saturating_mul(1_000_000);
    let mut calls = 1;
    while options.on_rank_lost == OnRankLost::Wait && !reunion.silent.is_empty() && clock.now_ns() < until_ns {
        calls += 1;
        // One that starts at this moment has its lock and no socket yet.
        if calls > 2 {
            tracing::warn!(silent = ?reunion.silent, "workers live and do not answer: they are called again");
        }
        reunion = call_survivors(lock, epoch, options.takeover_patience_ms, clock)?;
    }
    for (rank, mismatch) in &reunion.unusable {
        tracing::warn!(%rank, %mismatch, "a worker of an earlier producer cannot be taken over");
    }
    let silent = reunion.silent;
    if let Some((channel, _, latest, older)) = Reunion::latest(reunion.survived) {
        drain(older, "a later incarnation of the channel is taken over");
        match ground.reopen_of(channel, &latest) {
            Ok(found) => {
                check_silent(&found, &ground, &silent)?;
                match ground.take_over(found, latest, backend.clone()) {
                    Ok(opened) => return Ok(opened),
                    Err((error, latest)) => {
                        tracing::warn!(%error, "the channel starts cold");
                        drain(latest, STARTS_COLD);
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the channel starts cold");
                drain(latest, STARTS_COLD);
            }
        }
    } else if let Some(named) = named {
        match ground.find_named(named) {
            Ok(None) => {}
            Ok(Some(found)) => match ground.take_over(found, Vec::new(), backend.clone()) {
                Ok(opened) => return Ok(opened),
                Err((error, _)) => tracing::warn!(%error, "the named segments are made anew"),
            },
            Err(error @ ProcessError::Persist(_)) => return Err(error),
            Err(error) => tracing::warn!(%error, "the named segments are made anew"),
        }
    }
    if let Some(named) = named {
        let written = [SegmentKind::Control, SegmentKind::Pool].into_iter();
        remove_named(named, written.chain(rank_segments()))?;
    }
    ground.make(backend)
}

/// Calls on every worker that has a socket, and waits for the answers for a short while.
fn call_survivors(
    lock: &RoleLock,
    epoch: ProcessEpoch,
    patience_ms: u64,
    clock: &dyn Clock,
) -> Result<Reunion, ProcessError> {
    let call = Call {
        protocol: PROTOCOL,
        layout_hash: layout_hash(),
        producer_epoch: epoch,
        pid: std::process::id(),
    };
    let mut takeover = Takeover::start(lock, call, clock.now_ns(), patience_ms.saturating_mul(1_000_000))?;
    while !takeover.poll(clock.now_ns()) {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(takeover.finish())
}

/// X23: a worker that lives, belongs to this channel and does not answer may still read what would be reused.
fn check_silent(found: &Found, ground: &Ground<'_>, silent: &[(Rank, Holder)]) -> Result<(), ProcessError> {
    for (rank, holder) in silent {
        let member = read_member(&found.control, &ground.region, *rank);
        // A worker that waits to attach holds the lock of its rank too, and is no member yet.
        if holder.said.is_none_or(|(epoch, _)| epoch == member.epoch) {
            return Err(ProcessError::Silent {
                rank: *rank,
                holder: holder.to_string(),
            });
        }
    }
    Ok(())
}

fn drain(workers: Vec<Survived>, reason: &str) {
    for worker in workers {
        // It may be gone already.
        if let Err(error) = worker.drain(reason) {
            tracing::debug!(rank = %worker.surviving.rank, %error, "a worker cannot be told to drain");
        }
    }
}

fn rank_segments() -> impl Iterator<Item = SegmentKind> {
    (0..MAX_RANKS).map(|rank| SegmentKind::Rank(Rank(rank)))
}

fn remove_named(named: &Persistent, segments: impl IntoIterator<Item = SegmentKind>) -> Result<(), ProcessError> {
    for segment in segments {
        if let Some(file) = named.find(segment)? {
            let removed = Identity::of_descriptor(&file).and_then(|identity| named.discard(segment, identity));
            removed.map_err(system("remove a named segment"))?;
        }
    }
    Ok(())
}

impl Ground<'_> {
    fn wanted(&self, kind: SegmentKind, channel: Option<ChannelId>, mode: Mode) -> Wanted<'_> {
        Wanted {
            kind,
            mode,
            layout_hash: layout_hash(),
            channel,
            creator_epoch: None,
            peers: &self.peers,
        }
    }

    /// The segments that a worker handed back, opened for writing (X21).
    fn reopen_of(&self, channel: ChannelId, latest: &[Survived]) -> Result<Found, ProcessError> {
        let first = latest
            .first()
            .ok_or_else(|| system("take over")(std::io::ErrorKind::NotFound.into()))?;
        let mode = first.surviving.mode;
        let control_fd = reopen_writable(&first.control, SegmentKind::Control, mode)?;
        let pool_fd = reopen_writable(&first.pool, SegmentKind::Pool, mode)?;
        self.open_found(Some(channel), control_fd, pool_fd, mode)
    }

    /// Named segments that nobody holds (X26).
    fn find_named(&self, named: &Persistent) -> Result<Option<Found>, ProcessError> {
        let control = named.find(SegmentKind::Control)?;
        if let Some(control) = &control {
            named.claim(control)?;
        }
        let gone = |segment| {
            let message = format!("{} is gone", named.path_of(segment).display());
            Err(system("take over")(std::io::Error::other(message)))
        };
        match (control, named.find(SegmentKind::Pool)?) {
            (Some(control), Some(pool)) => self.open_found(None, control, pool, named.mode()).map(Some),
            (Some(_), None) => gone(SegmentKind::Pool),
            (None, Some(_)) => gone(SegmentKind::Control),
            (None, None) => Ok(None),
        }
    }

    fn open_found(
        &self,
        channel: Option<ChannelId>,
        control_fd: OwnedFd,
        pool_fd: OwnedFd,
        mode: Mode,
    ) -> Result<Found, ProcessError> {
        let control = open_writer(&control_fd, &self.wanted(SegmentKind::Control, channel, mode))?;
        let mut words = [0; HEADER_BYTES / 8];
        control.copy_out(0, &mut words);
        let channel = ChannelId(SegmentHeader::from_words(&words).channel.get());
        // Before anything else of it is read: another geometry may well have the same sizes.
        let charter = read_charter(&control)?;
        let (found, expected) = (geometry_hash(&charter.geometry), geometry_hash(&self.options.geometry));
        if found != expected || charter.map()? != self.region {
            return Err(ProcessError::OtherCharter {
                model: charter.geometry.model,
                found,
                found_ring: charter.ring_bytes,
                expected,
                ring: self.region.ring_bytes() as u64,
            });
        }
        let pool = open_writer(&pool_fd, &self.wanted(SegmentKind::Pool, Some(channel), mode))?;
        // Another geometry has other sizes; rounded up to whole pages as they were made.
        let sizes = [
            (
                "the control segment has another size than this geometry's",
                control.size(),
                self.region.control_bytes(),
            ),
            (
                "the pool has another size than this geometry's",
                pool.size(),
                self.map.pool_bytes() as usize,
            ),
        ];
        for (what, found, expected) in sizes {
            if found < expected || found - expected >= 1 << 30 {
                let message = format!("{what}: {found} bytes, expected {expected}");
                return Err(system("take over")(std::io::Error::other(message)));
            }
        }
        Ok(Found {
            channel,
            control_fd,
            pool_fd,
            control,
            pool,
        })
    }

    /// Reads the journal and the directory (X25). Gives the workers back where the journal cannot be trusted.
    fn take_over(
        &self,
        found: Found,
        latest: Vec<Survived>,
        backend: Arc<dyn Backend>,
    ) -> Result<Opened, (ProcessError, Vec<Survived>)> {
        let mut members = Vec::new();
        let mut segments = Vec::new();
        for one in &latest {
            let surviving = &one.surviving;
            let wanted = self.wanted(SegmentKind::Rank(surviving.rank), Some(found.channel), surviving.mode);
            let opened = open_reader(&one.rank, &wanted);
            let segment = match opened {
                Ok(segment) if segment.size() >= self.region.rank_bytes() => segment,
                Ok(segment) => {
                    let message = format!(
                        "rank segment of {} bytes: expected {}",
                        segment.size(),
                        self.region.rank_bytes()
                    );
                    return Err((system("take over")(std::io::Error::other(message)), latest));
                }
                Err(error) => return Err((error.into(), latest)),
            };
            members.push((surviving.rank, segment.clone(), surviving.worker_epoch, surviving.pid));
            segments.push(segment);
        }
        let leases = LeaseTable::new(&self.map);
        let producer = Producer::take_over(found.control.clone(), self.region.clone(), leases, self.epoch, members);
        let producer = match producer {
            Ok(producer) => producer,
            Err(error) => return Err((system("take over")(std::io::Error::other(error.to_string())), latest)),
        };
        let (control, pool) = (found.control.clone(), found.pool.clone());
        let store = HostStore::recover(control.clone(), pool, self.map.clone(), self.region.clone());
        // A worker whose entry an earlier takeover took away works for nobody: it attaches anew (X24).
        let is_member = |one: &Survived| producer.segment(one.surviving.rank).is_some();
        let (survivors, strangers): (Vec<_>, Vec<_>) =
            latest.into_iter().zip(segments).partition(|(one, _)| is_member(one));
        let strangers = strangers.into_iter().map(|(one, _)| one).collect();
        drain(strangers, "it is no member of the channel any more");
        let seated: Vec<Seated> = survivors
            .iter()
            .map(|(one, _)| {
                (
                    one.surviving.rank,
                    one.surviving.pid,
                    one.surviving.worker_epoch,
                    Identity::of_descriptor(&one.rank).ok(),
                )
            })
            .collect();
        Ok(Opened {
            host: self.host(found, backend, &seated),
            producer,
            store,
            control,
            survivors: survivors
                .into_iter()
                .map(|(survived, segment)| Survivor { survived, segment })
                .collect(),
            recovered: true,
        })
    }

    /// A new channel (X3a, X30).
    fn make(&self, backend: Arc<dyn Backend>) -> Result<Opened, ProcessError> {
        let channel = ChannelId(random()?);
        let reserve = self.reserve();
        let segment = |kind, bytes| NewSegment {
            kind,
            bytes,
            layout_hash: layout_hash(),
            channel,
            creator_epoch: self.epoch,
        };
        let control = segment(SegmentKind::Control, self.region.control_bytes());
        let control = create(&*backend, &control, &reserve)?;
        let pool = create(
            &*backend,
            &segment(SegmentKind::Pool, self.map.pool_bytes() as usize),
            &reserve,
        )?;
        let leases = LeaseTable::new(&self.map);
        let memory = control.memory.clone();
        let producer = Producer::new(memory.clone(), self.region.clone(), leases, self.epoch);
        let store = HostStore::new(
            memory.clone(),
            pool.memory.clone(),
            self.map.clone(),
            self.region.clone(),
        );
        let charter = Charter::new(&self.options.geometry, &self.region, &self.capability());
        write_charter(&memory, &self.region, &charter)?;
        control.make_ready();
        pool.make_ready();
        let found = Found {
            channel,
            control_fd: control.descriptor,
            pool_fd: pool.descriptor,
            control: memory.clone(),
            pool: pool.memory,
        };
        let host = self.host(found, backend, &[]);
        Ok(Opened {
            host,
            producer,
            store,
            control: memory,
            survivors: Vec::new(),
            recovered: false,
        })
    }

    fn reserve(&self) -> Reserve {
        Reserve {
            numa_node: self.options.numa_node,
            ..Reserve::default()
        }
    }

    fn capability(&self) -> Capability {
        let geometry = &self.options.geometry;
        let copy = geometry.groups.iter().all(|group| group.gather_blocks > 0);
        let kinds = SourceKinds {
            source_only: true,
            copy,
        };
        Capability::of(geometry, SelectionUnit::Block, kinds, self.epoch)
    }

    fn host(&self, found: Found, backend: Arc<dyn Backend>, seated: &[Seated]) -> Host {
        let geometry = &self.options.geometry;
        let place = |rank| match seated.iter().find(|(seated, ..)| *seated == Rank(rank)) {
            Some((_, pid, worker, segment)) => Place {
                chair: Chair::Taken,
                pid: *pid,
                worker: *worker,
                segment: *segment,
            },
            None => Place {
                chair: Chair::Free,
                pid: 0,
                worker: ProcessEpoch(0),
                segment: None,
            },
        };
        Host {
            lock: None,
            capability: self.capability(),
            needs_copy: self.options.workload.sources == Sources::Copy,
            reserve: self.reserve(),
            epoch: self.epoch,
            write_back_bytes: self.region.write_back_slots() as u64 * self.region.write_back_slot_bytes() as u64,
            region: self.region.clone(),
            places: (0..geometry.ranks).map(place).collect(),
            incarnation: Incarnation(0),
            generation: PoolGeneration(0),
            backend,
            found,
        }
    }
}
