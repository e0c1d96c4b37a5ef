//! One small trait for everything that moves blocks (D1), and the words it is written in.
//!
//! A [`Device`] owns, or has adopted from the embedding engine, a block pool, a set of tables and three queues. Work is
//! enqueued and never waited for: nothing here blocks, a caller polls events. Everything above this trait is
//! device-neutral.
//!
//! Promises of every device:
//! - fragments of one [`submit`](Device::submit) are unordered among themselves; submits, table writes, waits and events
//!   of one queue happen in the order in which they were enqueued;
//! - an event is [`Done`](EventState::Done) only when all work enqueued on its queue before it has read its sources to
//!   the end *and* its destinations are visible to work ordered after the event (X13);
//! - a failure is reported by the first event recorded behind it, and by the first event of every queue that waited for
//!   that one. Later events may be `Done`, so an operation is the worst of all its events;
//! - a lost device is lost for good: every unfinished event is [`Failed`](EventState::Failed), every call is refused (D7).
//!
//! Not promised: any order between queues without [`wait`](Device::wait), or any progress in bounded time.

pub mod adversary;
pub mod host;
pub mod region;

use thiserror::Error;

pub use region::{Access, HostSpan, Pinned, PlaceFault, RegionId, RegisterError, RegisterFault, UnregisterError};

/// The queues of a device. Work of one queue is ordered; queues run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Host to device, and moves inside the pool.
    CopyIn,
    /// Device to host.
    CopyOut,
    /// Where the engine's attention runs. Adopted from the engine where it brings one.
    Compute,
}

impl Queue {
    /// Every queue, in the order of [`Queue::index`].
    pub const ALL: [Self; 3] = [Self::CopyIn, Self::CopyOut, Self::Compute];

    /// The place of the queue in a table of all three.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// A point in the work of one queue. A plain handle: stale after [`Device::release`], and then never `Done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(u64);

impl Event {
    /// The handle of the event in place `index` of a device's table, in its `generation`-th use.
    pub(crate) const fn new(index: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | index as u64)
    }

    /// The place in the device's table of events.
    pub(crate) const fn index(self) -> usize {
        (self.0 & u32::MAX as u64) as usize
    }

    /// Which use of that place this handle names.
    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// What a poll of an event found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventState {
    /// Work before the event is still queued or running.
    Pending,
    /// All work before the event is finished and visible (X13).
    Done,
    /// Work before the event failed, the device is lost, or the handle is stale. Never turns into `Done`.
    Failed,
}

/// One contiguous copy. Offsets and lengths are bytes; host offsets count from the base of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// Host to device: reads `region`, writes the block pool.
    Upload {
        /// Registered region that is read.
        region: RegionId,
        /// First byte read, from the base of the region.
        host: u64,
        /// First byte written, from the base of the block pool.
        device: u64,
        /// Length of the copy.
        bytes: u64,
    },
    /// Device to host: reads the block pool, writes `region`, which must be writable.
    WriteBack {
        /// Registered region that is written.
        region: RegionId,
        /// First byte written, from the base of the region.
        host: u64,
        /// First byte read, from the base of the block pool.
        device: u64,
        /// Length of the copy.
        bytes: u64,
    },
    /// Inside the block pool. The two ranges may not overlap.
    Move {
        /// First byte read, from the base of the block pool.
        from: u64,
        /// First byte written, from the base of the block pool.
        to: u64,
        /// Length of the copy.
        bytes: u64,
    },
}

impl Fragment {
    /// Length of the copy in bytes.
    pub const fn bytes(&self) -> u64 {
        match self {
            Self::Upload { bytes, .. } | Self::WriteBack { bytes, .. } | Self::Move { bytes, .. } => *bytes,
        }
    }
}

/// A table in device memory: one request's block tables, all layers, so that one swap changes all of them (D10, R57).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableSlot(pub u32);

/// What fills the words of a table behind the written ones: no block has this number, so that a kernel which reads past
/// the end is seen at once and never reads another request's block (field bug 34).
pub const TABLE_POISON: u32 = u32::MAX;

/// Number and size of the tables. Fixed at start: a captured graph holds the stride (field bug 33).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Number of table slots: most requests at a time.
    pub slots: u32,
    /// 32-bit words per slot, and the distance between slots of one buffer.
    pub words: u32,
}

/// Where the block pool of a device comes from.
#[derive(Debug)]
pub enum PoolMemory {
    /// The device allocates it, zeroed.
    Allocate {
        /// Size of the pool.
        bytes: u64,
    },
    /// The embedding engine already owns it, and outlives the device.
    Adopt(AdoptedPool),
}

/// A block pool that the embedding engine owns.
#[derive(Debug)]
pub struct AdoptedPool {
    address: u64,
    bytes: u64,
}

impl AdoptedPool {
    /// Adopts `bytes` bytes of device memory at `address`: a `CUdeviceptr`, or for the host device a process address.
    ///
    /// # Safety
    /// Until the device that adopts it is dropped, the memory stays allocated, is readable and writable by the device,
    /// no Rust reference to it exists, and the engine touches it only in work that is ordered by queues and events.
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }

    /// Address of the first byte, in the device's own address space.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Size of the pool in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Where the compute queue of a device comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeQueue {
    /// The device creates it.
    Create,
    /// The engine's own queue: a `CUstream` as a number. It outlives the device.
    Adopt {
        /// The native handle.
        handle: u64,
    },
}

/// All that a device is opened with. Sizes are fixed at start: nothing is allocated per submit afterwards.
#[derive(Debug)]
pub struct DeviceSpec {
    /// The block pool.
    pub pool: PoolMemory,
    /// The compute queue.
    pub compute: ComputeQueue,
    /// The tables.
    pub tables: TableSpec,
    /// Most events between [`Device::record`] and [`Device::release`].
    pub events_max: u32,
    /// Most fragments that wait in one queue.
    pub fragments_max: u32,
    /// Most submits, waits, events and table writes that wait in one queue.
    pub commands_max: u32,
}

impl DeviceSpec {
    /// A spec with an allocated pool of `pool_bytes`, a created compute queue, `tables`, and roomy queues.
    pub const fn allocate(pool_bytes: u64, tables: TableSpec) -> Self {
        Self {
            pool: PoolMemory::Allocate { bytes: pool_bytes },
            compute: ComputeQueue::Create,
            tables,
            events_max: 4096,
            fragments_max: 1 << 17,
            commands_max: 1 << 14,
        }
    }
}

/// Why a device is gone (D7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DeviceLost {
    /// The driver reported an error that does not go away.
    #[error("the device is lost: driver error {code}; restart this worker")]
    Driver {
        /// The driver's code.
        code: u32,
    },
    /// The worker gave the device up: an event did not fire.
    #[error("the device is lost: given up by its worker after an event that did not fire; restart this worker")]
    Condemned,
    /// The device was closed.
    #[error("the device is closed")]
    Closed,
}

/// Why a submit was refused. Nothing of it was queued.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The device is lost.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// A fragment names memory that it may not touch. The planner's mistake, or a hostile peer's.
    #[error("fragment {index} of {count}: {fault}")]
    Place {
        /// Index of the fragment in the submit.
        index: usize,
        /// Number of fragments in the submit.
        count: usize,
        /// What is wrong with it.
        fault: PlaceFault,
    },
    /// The queue is full: poll, and submit again when work has ended.
    #[error("queue {queue:?} has no room for {needed} fragments: {free} free; poll events and submit again")]
    Full {
        /// The queue.
        queue: Queue,
        /// Fragments asked for.
        needed: usize,
        /// Fragments that fit now, 0 also where the queue has no room for another command.
        free: usize,
    },
}

/// Why an event was not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// The device is lost.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// All events are in use.
    #[error("all {events_max} events are in use: release finished ones, or raise events_max")]
    Exhausted {
        /// Size of the table of events.
        events_max: u32,
    },
    /// The queue has no room for another command.
    #[error("queue {queue:?} is full: poll events and record again")]
    Full {
        /// The queue.
        queue: Queue,
    },
}

/// Why a queue does not wait on an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WaitError {
    /// The device is lost.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// The handle names no event.
    #[error("{event:?} is not an event of this device, or was released")]
    Unknown {
        /// The handle.
        event: Event,
    },
    /// The queue has no room for another command.
    #[error("queue {queue:?} is full: poll events and wait again")]
    Full {
        /// The queue.
        queue: Queue,
    },
}

/// Why a table was not written. The device still holds the old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TableError {
    /// The device is lost.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// No such slot.
    #[error("table slot {found} of {slots}")]
    Slot {
        /// The slot asked for.
        found: u32,
        /// Number of slots.
        slots: u32,
    },
    /// More words than a slot holds.
    #[error("a table of {found} words in a slot of {words}; the stride is fixed at start: raise TableSpec::words")]
    TooLong {
        /// Words given.
        found: usize,
        /// Words that a slot holds.
        words: u32,
    },
    /// The slot's last write is still queued.
    #[error("table slot {slot}: its last write is still queued; poll its event and write again")]
    Busy {
        /// The slot.
        slot: u32,
    },
    /// The queue has no room for another command.
    #[error("queue {queue:?} is full: poll events and write again")]
    Full {
        /// The queue.
        queue: Queue,
    },
}

/// Why a device was not opened.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// Memory for the pool or the tables could not be had.
    #[error("no memory for {what} of {bytes} bytes; make it smaller")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// Size asked for.
        bytes: u64,
    },
    /// A number of the spec that no device can honour.
    #[error("{field} is {found}, at least {least} is needed")]
    Spec {
        /// The field of [`DeviceSpec`].
        field: &'static str,
        /// What it says.
        found: u64,
        /// The least that works.
        least: u64,
    },
    /// The spec adopts something that this kind of device cannot adopt.
    #[error("{what} cannot be adopted by a {device}; {remedy}")]
    Adopt {
        /// What was to be adopted.
        what: &'static str,
        /// The kind of device.
        device: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
}

/// What moves blocks: a GPU, or the host device. See the [module](self) for the order and failure rules.
pub trait Device: Send {
    /// What the device is, for messages.
    fn name(&self) -> &str;

    /// Size of the block pool in bytes.
    fn pool_bytes(&self) -> u64;

    /// Number and size of the tables.
    fn tables(&self) -> TableSpec;

    /// Most fragments of one submit.
    fn submit_max(&self) -> usize;

    /// Admits host memory whose chunks end at `chunk_ends` (offsets from the base; ascending, the last is the size).
    /// Nothing is pinned yet: see [`pin_next`](Device::pin_next). A copy never crosses a chunk's end (X31, field bug 12).
    fn register(&mut self, span: HostSpan, chunk_ends: &[u64]) -> Result<RegionId, RegisterError>;

    /// Pins the next chunk of `region` and returns the watermark; copies are accepted below it. Pinning one chunk may
    /// take seconds: call it at start, or from the idle path. A chunk that fails undoes the whole region (all or none,
    /// X31) and leaves no sticky driver error behind (field bug 9).
    fn pin_next(&mut self, region: RegionId) -> Result<Pinned, RegisterError>;

    /// Unpins and forgets a region. Refused while queued copies name it.
    fn unregister(&mut self, region: RegionId) -> Result<(), UnregisterError>;

    /// Enqueues `fragments`, unordered among themselves, all or none. Each is checked against its region and the pool.
    fn submit(&mut self, queue: Queue, fragments: &[Fragment]) -> Result<(), SubmitError>;

    /// Enqueues the replacement of a whole table, with [`TABLE_POISON`] behind `words`. The words go to the buffer that
    /// is not in use, then one store swaps the buffers: a reader that looks up the buffer once sees the whole old or the
    /// whole new table (D10, F15). The buffer written is the one that readers from before the *previous* swap may still
    /// use: make `queue` wait for them first.
    fn write_table(&mut self, queue: Queue, slot: TableSlot, words: &[u32]) -> Result<(), TableError>;

    /// Enqueues an event behind all work of `queue` so far. Release it when it is no longer polled.
    fn record(&mut self, queue: Queue) -> Result<Event, RecordError>;

    /// Makes work enqueued on `queue` from now on start after `event`, whichever queue recorded it.
    fn wait(&mut self, queue: Queue, event: Event) -> Result<(), WaitError>;

    /// The state of an event. Never blocks.
    fn poll(&mut self, event: Event) -> EventState;

    /// Gives an event's place back, finished or not. Queues that wait on it still do. A stale handle is ignored.
    fn release(&mut self, event: Event);

    /// Whether the device is lost, and why. Sticky.
    fn health(&self) -> Result<(), DeviceLost>;

    /// Gives the device up: it is lost from now on. For a watchdog whose event never fires (D5): the worker then answers
    /// `Failed` for everything and exits, and its exit is the proof that nothing runs any more.
    fn condemn(&mut self);

    /// Registers and pins a whole region, all or none.
    fn register_all(&mut self, span: HostSpan, chunk_ends: &[u64]) -> Result<RegionId, RegisterError> {
        let region = self.register(span, chunk_ends)?;
        while !self.pin_next(region)?.complete() {}
        Ok(region)
    }
}
