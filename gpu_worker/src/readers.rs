//! Compute and copies kept apart: layer-ready events and reader fences (X18, X19).
//!
//! An operation that writes blocks is a *writer* here and goes through four steps:
//! 1. [`open`](Readers::open) when it is read from the ring; the engine may ask for its layers, and is refused for now;
//! 2. [`start`](Readers::start) before its first copy: a fence behind all compute so far, and the fences of everybody
//!    who still reads its destinations, hold back the copy queue (X19);
//! 3. [`layer_ready`](Readers::layer_ready) behind each layer's copies. From here on the engine's compute queue may
//!    [`wait_layer`](Readers::wait_layer), which registers a reader, until [`end_read`](Readers::end_read) behind the
//!    kernels that read (X18). What it reads before the operation is committed on all ranks is speculative;
//! 4. [`retire`](Readers::retire) at its terminal. The writer lives on until its last reader's fence has passed, so
//!    that the next writer of the same blocks waits for it.
//!
//! A reader that is registered and not ended has no fence yet: nobody knows which kernels are still to come. A writer
//! of its blocks is held: [`StartError::Held`].

use kvsluice_layout::ids::{DecoderLayer, GroupId, PhysicalBlock};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::device::{Device, Event, EventState, Queue, RecordError, WaitError};

/// An operation that writes blocks, from [`Readers::open`] until it is retired and nobody reads what it wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WriterId {
    place: u32,
    serial: u32,
}

/// All places are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{writers_max} operations are open or still read, which is the most; sweep, and open again")]
pub struct Full {
    /// Most writers.
    pub writers_max: usize,
}

/// Why an operation may not write yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StartError {
    /// The writer is retired.
    #[error("{writer:?} is not open")]
    Unknown {
        /// The writer.
        writer: WriterId,
    },
    /// A destination has a reader without a fence: start again once the engine has ended the read.
    #[error("{group:?}, {block:?} is read through {reader:?}; start again when that read has ended")]
    Held {
        /// Group of the block.
        group: GroupId,
        /// The block.
        block: PhysicalBlock,
        /// Who wrote what is read.
        reader: WriterId,
    },
    /// The device records no fence.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The copy queue does not wait.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// Why the compute queue does not wait on a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReadError {
    /// The writer is retired: what it wrote is in the tables.
    #[error("{writer:?} is not open")]
    Unknown {
        /// The writer.
        writer: WriterId,
    },
    /// The writer has no fence yet: compute that waited for it now would hold back that fence (X19).
    #[error("{writer:?} has not started: its fence would wait for itself; ask again later")]
    NotFenced {
        /// The writer.
        writer: WriterId,
    },
    /// The layer's copies are not submitted yet, or the operation does not write it.
    #[error("{layer:?} of {writer:?} is not submitted; ask again later")]
    NotReady {
        /// The writer.
        writer: WriterId,
        /// The layer.
        layer: DecoderLayer,
    },
    /// The compute queue does not wait.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// Why a read was not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum EndReadError {
    /// No read of that writer is open.
    #[error("no read through {writer:?} is open")]
    NotReading {
        /// The writer.
        writer: WriterId,
    },
    /// The device records no fence: the read stays open.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// One operation that writes blocks.
#[derive(Debug)]
struct Writer {
    serial: u32,
    open: bool,
    fenced: bool,
    /// By layer: the event behind its copies.
    ready: Vec<Option<Event>>,
    /// Reads that are registered and not ended.
    reads: u32,
    /// Behind the last ended read.
    fence: Option<Event>,
}

impl Writer {
    fn is_read(&self) -> bool {
        self.reads > 0 || self.fence.is_some()
    }
}

/// Makes `queue` wait for all compute so far: before destinations are overwritten (X19), before a write-back reads what
/// compute wrote (D6), and before a Reset empties the device (X24a).
pub fn after_compute<D: Device + ?Sized>(device: &mut D, queue: Queue) -> Result<(), StartError> {
    let fence = device.record(Queue::Compute)?;
    let waits = device.wait(queue, fence);
    device.release(fence); // the queue waits for it all the same
    Ok(waits?)
}

/// The writers of one device and their readers. Sized at start; no call but `start` costs more than its own work.
pub struct Readers {
    writers: Vec<Writer>,
    free: Vec<u32>,
    /// Places whose fence has not passed.
    fenced: Vec<u32>,
    /// Per group, per physical block: who wrote it last.
    last: Vec<Vec<WriterId>>,
    /// Fences to wait for, while a writer starts.
    fences: Vec<Event>,
}

impl Readers {
    /// For the device pools of `map`, and at most `writers_max` operations that are open or still read.
    pub fn new(map: &GeometryMap, writers_max: u32) -> Self {
        let geometry = map.geometry();
        let ready = vec![None; geometry.layers.len()];
        // Serials start above that of a default id, which therefore names nobody.
        let writer = |_| Writer {
            serial: 1,
            open: false,
            fenced: false,
            ready: ready.clone(),
            reads: 0,
            fence: None,
        };
        let blocks = |count: u32| vec![WriterId::default(); count as usize];
        Self {
            writers: (0..writers_max).map(writer).collect(),
            free: (0..writers_max).rev().collect(),
            fenced: Vec::with_capacity(writers_max as usize),
            last: geometry
                .groups
                .iter()
                .map(|group| blocks(group.device_blocks))
                .collect(),
            fences: Vec::with_capacity(writers_max as usize),
        }
    }

    /// Opens a writer.
    pub fn open(&mut self) -> Result<WriterId, Full> {
        let writers_max = self.writers.len();
        let place = self.free.pop().ok_or(Full { writers_max })?;
        let writer = self.writers.get_mut(place as usize).ok_or(Full { writers_max })?;
        writer.open = true;
        writer.fenced = false;
        Ok(WriterId {
            place,
            serial: writer.serial,
        })
    }

    /// Makes `queue` wait for all compute so far and for every reader of `destinations`, which the writer is about to
    /// write on that queue (X19). Without effect on [`StartError::Held`]; after another error start again, or retire.
    pub fn start<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        queue: Queue,
        id: WriterId,
        destinations: impl Iterator<Item = (GroupId, PhysicalBlock)> + Clone,
    ) -> Result<(), StartError> {
        self.open_writer(id).ok_or(StartError::Unknown { writer: id })?;
        self.fences.clear();
        for (group, block) in destinations.clone() {
            let last = self
                .last
                .get(group.index())
                .and_then(|blocks| blocks.get(block.index()))
                .copied();
            let Some((reader, writer)) = last.and_then(|id| Some((id, self.get(id)?))) else {
                continue;
            };
            if writer.reads > 0 && !planted("overwrite_open_reads") {
                return Err(StartError::Held { group, block, reader });
            }
            if let Some(fence) = writer.fence.filter(|fence| !self.fences.contains(fence)) {
                self.fences.push(fence);
            }
        }
        if !planted("no_reader_fence") {
            after_compute(device, queue)?;
            for &fence in &self.fences {
                device.wait(queue, fence)?;
            }
        }
        self.open_writer(id).ok_or(StartError::Unknown { writer: id })?.fenced = true;
        for (group, block) in destinations {
            if let Some(last) = self
                .last
                .get_mut(group.index())
                .and_then(|blocks| blocks.get_mut(block.index()))
            {
                *last = id;
            }
        }
        Ok(())
    }

    /// Keeps `event`, which was recorded behind the copies of `layer`, until the writer is retired. Gives it back where
    /// the writer is not open, or has no such layer, or has it already.
    pub fn layer_ready(&mut self, id: WriterId, layer: DecoderLayer, event: Event) -> Result<(), Event> {
        let ready = self
            .open_writer(id)
            .and_then(|writer| writer.ready.get_mut(layer.index()));
        match ready {
            Some(ready @ None) => {
                *ready = Some(event);
                Ok(())
            }
            _ => Err(event),
        }
    }

    /// The event behind the copies of `layer`, for a caller that polls it.
    pub fn layer_event(&self, id: WriterId, layer: DecoderLayer) -> Option<Event> {
        *self.get(id)?.ready.get(layer.index())?
    }

    /// Whether the copies of any layer failed: a device reports a failure with the first event behind it, which is the
    /// layer's, and not again with the writer's last (X12). Asked once the last has fired.
    pub fn failed<D: Device + ?Sized>(&self, device: &mut D, id: WriterId) -> bool {
        let ready = self.get(id).map_or(&[][..], |writer| &writer.ready);
        ready
            .iter()
            .flatten()
            .any(|event| device.poll(*event) == EventState::Failed)
    }

    /// Makes the compute queue wait for `layer`, and registers a reader of the writer's destinations (X18). Each such
    /// wait is ended with [`end_read`](Readers::end_read).
    pub fn wait_layer<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        id: WriterId,
        layer: DecoderLayer,
    ) -> Result<(), ReadError> {
        let writer = self.open_writer(id).ok_or(ReadError::Unknown { writer: id })?;
        if !writer.fenced && !planted("hand_out_before_fence") {
            return Err(ReadError::NotFenced { writer: id }); // X19
        }
        let ready = writer.ready.get(layer.index()).copied().flatten();
        device.wait(Queue::Compute, ready.ok_or(ReadError::NotReady { writer: id, layer })?)?;
        writer.reads += 1;
        Ok(())
    }

    /// Ends one read: all its kernels are enqueued, and a fence goes behind them. The writer may be retired by now.
    pub fn end_read<D: Device + ?Sized>(&mut self, device: &mut D, id: WriterId) -> Result<(), EndReadError> {
        let reading = self.writer(id).filter(|writer| writer.reads > 0);
        let writer = reading.ok_or(EndReadError::NotReading { writer: id })?;
        let fence = device.record(Queue::Compute)?;
        writer.reads -= 1;
        match writer.fence.replace(fence) {
            // One compute queue: the later fence stands for the earlier one too.
            Some(before) => device.release(before),
            None => self.fenced.push(id.place),
        }
        Ok(())
    }

    /// Ends a writer at its terminal: its layer events are released. Readers it has still count.
    pub fn retire<D: Device + ?Sized>(&mut self, device: &mut D, id: WriterId) {
        if let Some(writer) = self.open_writer(id) {
            writer.open = false;
            writer
                .ready
                .iter_mut()
                .filter_map(Option::take)
                .for_each(|event| device.release(event));
            self.recycle(id.place);
        }
    }

    /// Forgets readers whose fence has passed. Call it from the polling loop; costs one poll per fence.
    pub fn sweep<D: Device + ?Sized>(&mut self, device: &mut D) {
        let mut at = 0;
        while let Some(&place) = self.fenced.get(at) {
            let writer = self.writers.get_mut(place as usize);
            let Some((writer, fence)) = writer.and_then(|writer| writer.fence.map(|fence| (writer, fence))) else {
                self.fenced.swap_remove(at);
                continue;
            };
            if device.poll(fence) == EventState::Pending {
                at += 1;
                continue;
            }
            device.release(fence);
            writer.fence = None;
            self.fenced.swap_remove(at);
            self.recycle(place);
        }
    }

    /// Whether a read of what the writer wrote may still be under way: then its destinations are not free (X18).
    pub fn is_read(&self, id: WriterId) -> bool {
        self.get(id).is_some_and(Writer::is_read)
    }

    /// Whether any read may still be under way: a Reset waits for this (X24a).
    pub fn any_read(&self) -> bool {
        self.writers.iter().any(Writer::is_read)
    }

    /// Frees a place that is neither open nor read: ids of it are stale from here on.
    fn recycle(&mut self, place: u32) {
        if let Some(writer) = self
            .writers
            .get_mut(place as usize)
            .filter(|writer| !writer.open && !writer.is_read())
        {
            writer.serial = writer.serial.wrapping_add(1);
            self.free.push(place);
        }
    }

    fn get(&self, id: WriterId) -> Option<&Writer> {
        self.writers
            .get(id.place as usize)
            .filter(|writer| writer.serial == id.serial)
    }

    fn writer(&mut self, id: WriterId) -> Option<&mut Writer> {
        self.writers
            .get_mut(id.place as usize)
            .filter(|writer| writer.serial == id.serial)
    }

    fn open_writer(&mut self, id: WriterId) -> Option<&mut Writer> {
        self.writer(id).filter(|writer| writer.open)
    }
}

#[cfg(test)]
mod tests;
