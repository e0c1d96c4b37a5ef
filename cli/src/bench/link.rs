//! Two processes on two cores: this one is the producer, its peer the worker.
//!
//! The segments are those of a channel: control and pool are written here, the rank segment by the peer, and the peer
//! gets them as inherited descriptors. The baselines use the same memory: words and bytes downwards in the pool, upwards
//! in the rank's write-back area. Orders to the peer are words too, so that nothing but the measured path runs.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};
use kvsluice_layout::ids::{ChannelId, PoolGeneration, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::region::{RegionMap, layout_hash};
use kvsluice_layout::segment::SegmentKind;
use kvsluice_transport::peers::Peers;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::segment::{
    self, Created, Mapping, MappingMut, Memfd, Mode, NewSegment, Reserve, Wanted, reopen_read_only,
};
use kvsluice_transport::shared::{Shared, SharedMut};
use nix::sys::resource::{UsageWho, getrusage};
use rustix::io::{FdFlags, fcntl_setfd};

use super::{Setup, machine};

/// Pool: the order to the peer: its number, what to do, how often, and with how many bytes.
pub(super) const ORDER_AT: usize = 4096;
/// Pool: the word that a bare ping stores.
pub(super) const PING_AT: usize = 4096 + 512;
/// Pool: when the waker began, in nanoseconds of the monotonic clock, which is one for both processes.
pub(super) const STAMP_AT: usize = 4096 + 1024;
/// Pool: the 32-bit counter that the bare sleeper sleeps on.
pub(super) const COUNTER_AT: usize = 4096 + 1536;
/// Pool: the ring of the bare stream, as large as the plan ring.
pub(super) const STREAM_AT: usize = 8192;
/// Write-back area: number of the order that is done, how often the peer lost its core and allocated meanwhile.
pub(super) const DONE_AT: usize = 0;
/// Write-back area: how often the peer was woken, and how long the last time took in nanoseconds.
pub(super) const WOKEN_AT: usize = 256;
/// Write-back area: 1 while the bare sleeper sleeps, or is about to.
pub(super) const ASLEEP_AT: usize = 1792;
/// Write-back area: the word that answers a bare ping.
pub(super) const PONG_AT: usize = 512;
/// Write-back area: records of the bare stream that were taken.
pub(super) const TAKEN_AT: usize = 1024;
/// Write-back area: plans that were received and validated on the order [`Order::Validate`].
pub(super) const VALIDATED_AT: usize = 1536;
const WRITE_BACK_BYTES: usize = 2048;

const CHANNEL: ChannelId = ChannelId(0x62656e6368);
/// Process epochs of the two sides; one run of one pair needs no random ones.
pub(super) const PRODUCER: ProcessEpoch = ProcessEpoch(0xA);
pub(super) const WORKER: ProcessEpoch = ProcessEpoch(0xB);

/// What the peer is to do, `count` times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(super) enum Order {
    /// Receive plans and answer each with Done.
    Answer = 1,
    /// Receive plans, say that each is validated, then answer it.
    Validate = 2,
    /// Answer bare pings.
    Pong = 3,
    /// Take records of `bytes` bytes from the bare stream, as fast as they come.
    Take = 4,
    /// Take records of `bytes` bytes from the bare stream and say so after each.
    TakeEach = 5,
    /// Raise the marker signal: tells the process that traces this one where the steady state begins and ends.
    Mark = 6,
    /// Exit.
    Quit = 7,
    /// Sleep until a plan comes, say how long the wake took, and answer it.
    Doze = 8,
    /// Sleep on a bare futex and say how long the wake took.
    DozeBare = 9,
    /// Wait for plans that do not come, for `count` milliseconds, and say how many microseconds of processor time
    /// that took.
    Idle = 10,
}

impl Order {
    pub(super) fn from_code(code: u64) -> Option<Self> {
        use Order::{Answer, Doze, DozeBare, Idle, Mark, Pong, Quit, Take, TakeEach, Validate};
        [Answer, Validate, Pong, Take, TakeEach, Mark, Quit, Doze, DozeBare, Idle]
            .into_iter()
            .find(|order| *order as u64 == code)
    }
}

/// Blocks of the host pool.
pub(super) const SOURCE_BLOCKS: u32 = 4096;
/// Blocks of the device pool, the null block included.
pub(super) const DEVICE_BLOCKS: u32 = 2048;

/// Sizes that both processes derive everything from. 64 layers, one row each; tables that fit no first-level cache.
pub(super) fn geometry() -> Result<GeometryMap> {
    let sizing = Sizing {
        source_blocks: Some(SOURCE_BLOCKS),
        device_blocks: Some(DEVICE_BLOCKS),
        ..Sizing::default()
    };
    let geometry = sizing.apply(preset("qwen3-32b")?)?;
    Ok(GeometryMap::new(&geometry)?)
}

/// The region map of the benchmark's channel.
pub(super) fn region(geometry: &GeometryMap, ring_bytes: usize) -> Result<RegionMap> {
    Ok(RegionMap::new(geometry.geometry(), ring_bytes, 1, WRITE_BACK_BYTES)?)
}

/// First byte of the benchmark's words in the rank segment.
pub(super) fn up_at(map: &RegionMap) -> Result<usize> {
    map.write_back_at(0).context("the rank segment has no write-back area")
}

/// What a segment of this channel must be for its receiver to map it.
pub(super) fn wanted(kind: SegmentKind, peers: &Peers) -> Wanted<'_> {
    Wanted {
        kind,
        mode: Mode::Memfd,
        layout_hash: layout_hash(),
        channel: Some(CHANNEL),
        creator_epoch: Some(PRODUCER),
        peers,
    }
}

/// How often the kernel took the core from this process.
pub(super) fn core_losses() -> u64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.involuntary_context_switches() as u64)
}

/// The channel and the way to the peer.
pub(super) struct Pair {
    pub(super) link: Link,
    pub(super) producer: Producer<MappingMut, Mapping>,
}

/// The way to the peer.
pub(super) struct Link {
    pub(super) down: MappingMut,
    pub(super) up: Mapping,
    /// First byte of the benchmark's words in `up`.
    pub(super) up_at: usize,
    pub(super) peer: Peer,
    orders: u64,
    losses: u64,
}

/// The peer process.
pub(super) struct Peer(Child);

impl Pair {
    /// Starts the peer, pins both and resets the channel, so that data records pass.
    pub(super) fn start(setup: &Setup) -> Result<Self> {
        let [core, peer_core] = setup.cores;
        let ring_bytes = setup.ring_bytes;
        let geometry = geometry()?;
        let map = region(&geometry, ring_bytes)?;
        let control = create(SegmentKind::Control, map.control_bytes())?;
        let pool = create(SegmentKind::Pool, STREAM_AT + ring_bytes)?;
        let rank = create(SegmentKind::Rank(Rank(0)), map.rank_bytes())?;
        for segment in [&control, &pool, &rank] {
            segment.make_ready();
        }
        let (rank, up) = rank.hand_over()?;
        let handed = [
            reopen_read_only(&control.descriptor)?,
            reopen_read_only(&pool.descriptor)?,
            rank,
        ];
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "bench",
            "peer",
            "--core",
            &peer_core.to_string(),
            "--ring-bytes",
            &ring_bytes.to_string(),
        ]);
        for (name, descriptor) in ["--control", "--pool", "--rank"].iter().zip(&handed) {
            fcntl_setfd(descriptor, FdFlags::empty())?; // this one child inherits it
            command.args([name, descriptor.as_raw_fd().to_string().as_str()]);
        }
        // The peer inherits where this process may run, and must not wait for the core that it will spin on.
        machine::pin(&setup.cores)?;
        let peer = command.spawn().context("cannot start the peer process")?;
        drop(handed);
        machine::pin(&[core])?;

        let mut producer = Producer::new(control.memory, map.clone(), LeaseTable::new(&geometry), PRODUCER);
        producer.join(Rank(0), up.clone(), WORKER, peer.id());
        let link = Link {
            down: pool.memory,
            up,
            up_at: up_at(&map)?,
            peer: Peer(peer),
            orders: 0,
            losses: 0,
        };
        let mut pair = Self { link, producer };
        let mut draft = PlanDraft::new();
        draft.reset(PoolGeneration(1));
        pair.link.order(Order::Answer, 1, 0);
        pair.producer.publish(&draft)?;
        pair.completions(1)?;
        pair.link.settle()?;
        if let Some(closed) = pair.producer.closed() {
            bail!("the channel stays closed after its Reset: {closed}");
        }
        Ok(pair)
    }

    /// Waits for `count` completions and takes them.
    ///
    /// # Errors
    /// Names the first that is not Done: a benchmark of refusals would measure something else.
    pub(super) fn completions(&mut self, count: usize) -> Result<()> {
        let Self { link, producer } = self;
        for _ in 0..count {
            let mut ended = None;
            link.peer.wait(|| {
                producer.poll();
                ended = producer.next_completion();
                ended.is_some()
            })?;
            done(ended)?;
        }
        Ok(())
    }
}

/// Refuses a completion that is not Done.
pub(super) fn done(completion: Option<kvsluice_transport::producer::Completion>) -> Result<()> {
    match completion {
        Some(c) if c.terminal != kvsluice_layout::record::Terminal::Done => {
            bail!(
                "operation {} ended {:?}: {}",
                c.operation.operation_id,
                c.terminal,
                kvsluice_layout::refusal::reason(c.reason)
            )
        }
        _ => Ok(()),
    }
}

impl Link {
    /// Tells the peer what to do; it begins at once.
    pub(super) fn order(&mut self, order: Order, count: u64, bytes: u64) {
        self.orders += 1;
        self.losses = core_losses();
        self.down.copy_in(ORDER_AT + 8, &[order as u64, count, bytes]);
        self.down.store_release(ORDER_AT, self.orders); // pairs with: peer::Worker::next_order
    }

    /// Waits until the peer has done its order. True where neither process lost its core meanwhile.
    pub(super) fn settle(&mut self) -> Result<bool> {
        let Self {
            up,
            up_at,
            peer,
            orders,
            losses,
            ..
        } = self;
        let at = *up_at + DONE_AT;
        // pairs with: peer::Worker::done
        peer.wait(|| up.load_acquire(at) == *orders)?;
        Ok(up.load(at + 8) == 0 && core_losses() == *losses)
    }

    /// Heap allocations of the peer during the order that it did last.
    pub(super) fn peer_allocations(&self) -> u64 {
        self.up.load(self.up_at + DONE_AT + 16)
    }
}

impl Peer {
    /// Spins until `ready`, and looks now and then whether the peer still lives.
    pub(super) fn wait(&mut self, mut ready: impl FnMut() -> bool) -> Result<()> {
        loop {
            for _ in 0..1 << 26 {
                if ready() {
                    return Ok(());
                }
            }
            if let Some(status) = self.0.try_wait()? {
                bail!("the peer process ended: {status}");
            }
        }
    }
}

impl Drop for Peer {
    /// # Drop behaviour
    /// Ends the peer, whatever it does.
    fn drop(&mut self) {
        // Both fail only where the peer is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn create(kind: SegmentKind, bytes: usize) -> Result<Created> {
    let new = NewSegment {
        kind,
        bytes,
        layout_hash: layout_hash(),
        channel: CHANNEL,
        creator_epoch: PRODUCER,
    };
    Ok(segment::create(&Memfd { hardened: false }, &new, &Reserve::default())?)
}

/// The descriptor that this process inherited under a number, as one of its own.
pub(super) fn inherited(number: i32, write: bool) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{number}");
    let file = File::options().read(true).write(write).open(&path);
    Ok(file
        .with_context(|| format!("cannot open {path}, which the producer handed over"))?
        .into())
}
