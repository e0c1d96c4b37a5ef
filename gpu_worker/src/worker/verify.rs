//! Verification: the bytes at a destination, read back and compared with what the plan says they are.
//!
//! A plan may carry a content tag per pair (see [`kvsluice_layout::content`]). For an upload the blocks written are
//! compared, for a retain what attention would read through the new tables. The check runs before the operation is
//! answered, while its blocks are still leased, and reads through the device's own copy queue.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use kvsluice_layout::content;
use kvsluice_layout::ids::{DecoderLayer, GroupId, Position, Rank};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{ALL_LAYERS, Kind, Pair, RowRecord};

use crate::copy::{CopyPlanner, HostPool};
use crate::device::{Access, Device, Event, EventState, HostSpan, Queue, RegisterError};

/// How much is verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Every byte.
    #[default]
    Full,
    /// One block in sixteen.
    Sample,
    /// Nothing.
    Off,
}

const BUFFER_ALIGN: usize = 4096;
/// One block in so many is verified in a sample.
const SAMPLE: u64 = 16;

/// Private memory that the device copies into. Owned as a raw range: while a copy is queued there is no reference to it.
struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer is owned memory without any tie to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(BUFFER_ALIGN), BUFFER_ALIGN).ok()?;
        // SAFETY: the layout's size is at least BUFFER_ALIGN, not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Some(Self { base, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout. The worker drops its device, and with it every queued copy, first.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// The check that is under way.
struct Check {
    position: Position,
    row: usize,
    /// Which layer of a row for all layers of its group.
    layer: usize,
    pair: usize,
    event: Option<Event>,
    /// Tags of the blocks in the buffer, in slot order.
    tags: Vec<u64>,
}

/// Verifies one operation at a time.
pub struct Verifier {
    mode: Verify,
    buffer: Option<(Buffer, HostPool)>,
    planner: CopyPlanner,
    pairs: Vec<Pair>,
    check: Option<Check>,
    verified: u64,
    mismatched: u64,
}

impl Verifier {
    /// A verifier whose private buffer of `bytes` is registered with `device`.
    ///
    /// # Errors
    /// [`RegisterError`] where the device cannot register it.
    pub fn new<D: Device>(mode: Verify, device: &mut D, bytes: usize) -> Result<Self, RegisterError> {
        let mut verifier = Self {
            mode,
            buffer: None,
            planner: CopyPlanner::default(),
            pairs: Vec::new(),
            check: None,
            verified: 0,
            mismatched: 0,
        };
        if mode == Verify::Off {
            return Ok(verifier);
        }
        let bytes = bytes.next_multiple_of(BUFFER_ALIGN);
        if let Some(buffer) = Buffer::new(bytes) {
            let ends = [bytes as u64];
            // SAFETY: the buffer lives as long as the verifier, which its worker drops after the device; it is read
            // only when no queued copy writes it (see `compare`).
            let span = unsafe { HostSpan::new(buffer.base.as_ptr(), bytes as u64, Access::ReadWrite) };
            let region = device.register_all(span, &ends)?;
            verifier.buffer = Some((buffer, HostPool::new(region, &ends)));
        }
        Ok(verifier)
    }

    /// Whether the plan carries tags that this verifier would compare.
    pub(super) fn wants(&self, plan: &Plan<'_>) -> bool {
        let tagged = plan.rows().iter().any(|row| !plan.tags(row).is_empty());
        self.buffer.is_some() && tagged && matches!(plan.kind(), Kind::Upload | Kind::Retain)
    }

    /// Verified and differing bytes since the last call.
    pub(super) fn take(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.verified), std::mem::take(&mut self.mismatched))
    }

    /// Drops the check of an operation that ends otherwise.
    pub(super) fn give_up<D: Device>(&mut self, position: Position, device: &mut D) {
        if let Some(check) = self.check.take_if(|check| check.position == position)
            && let Some(event) = check.event
        {
            device.release(event);
        }
    }

    /// Moves the check of `plan` on: Pending until every batch was compared, then Done.
    pub(super) fn advance<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        rank: Rank,
        map: &GeometryMap,
        device: &mut D,
    ) -> EventState {
        let position = plan.position();
        let check = self.check.get_or_insert_with(|| Check {
            position,
            row: 0,
            layer: 0,
            pair: 0,
            event: None,
            tags: Vec::new(),
        });
        if check.position != position {
            return EventState::Pending;
        }
        loop {
            let Some(check) = &mut self.check else {
                return EventState::Failed;
            };
            let Some(row) = plan.rows().get(check.row) else {
                self.check = None;
                return EventState::Done;
            };
            let Some(layer) = layer_of(map, row, check.layer) else {
                (check.row, check.layer, check.pair) = (check.row + 1, 0, 0);
                continue;
            };
            if let Some(event) = check.event {
                match device.poll(event) {
                    EventState::Pending => return EventState::Pending,
                    state => {
                        device.release(event);
                        check.event = None;
                        if state == EventState::Failed {
                            self.check = None;
                            return EventState::Failed;
                        }
                        self.compare(map, rank, layer);
                        continue;
                    }
                }
            }
            if check.pair >= plan.pairs(row).len() {
                (check.layer, check.pair) = (check.layer + 1, 0);
                continue;
            }
            if !self.read_back(plan, row, map, rank, layer, device) {
                return EventState::Pending;
            }
        }
    }

    /// Enqueues the copy of the next blocks into the buffer. False where the device has no room.
    fn read_back<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        row: &RowRecord,
        map: &GeometryMap,
        rank: Rank,
        layer: DecoderLayer,
        device: &mut D,
    ) -> bool {
        let (Some(check), Some((buffer, area))) = (&mut self.check, &self.buffer) else {
            return false;
        };
        let slot_bytes = map.shard_block_bytes(rank, layer).max(1);
        let most = (buffer.layout.size() as u64 / slot_bytes).max(1) as usize;
        let (pairs, tags) = (plan.pairs(row), plan.tags(row));
        self.pairs.clear();
        check.tags.clear();
        let mut at = check.pair;
        while at < pairs.len() && self.pairs.len() < most {
            let chosen = self.mode == Verify::Full || (plan.position().0 / 64 + at as u64).is_multiple_of(SAMPLE);
            if chosen && let (Some(pair), Some(tag)) = (pairs.get(at), tags.get(at)) {
                self.pairs.push(Pair {
                    source: pair.destination,
                    destination: 0,
                });
                check.tags.push(*tag);
            }
            at += 1;
        }
        if self.pairs.is_empty() {
            check.pair = at;
            return true;
        }
        self.planner.clear();
        self.planner
            .write_back(area, 0, slot_bytes, map.planes(rank, layer), &self.pairs);
        for fragments in self.planner.fragments().chunks(device.submit_max()) {
            if device.submit(Queue::CopyOut, fragments).is_err() {
                return false; // read back again from the start of the batch, which changes nothing
            }
        }
        let Ok(event) = device.record(Queue::CopyOut) else {
            return false;
        };
        check.event = Some(event);
        check.pair = at;
        true
    }

    fn compare(&mut self, map: &GeometryMap, rank: Rank, layer: DecoderLayer) {
        let (Some(check), Some((buffer, _))) = (&self.check, &self.buffer) else {
            return;
        };
        let Some(layer_map) = map.layer(layer) else { return };
        let shard = rank.0 * layer_map.shards / map.geometry().ranks;
        let planes = map.planes(rank, layer);
        let slot_bytes: u64 = planes.iter().map(|plane| plane.bytes).sum();
        // SAFETY: the event behind the copies has fired and none was queued since, so nothing writes the buffer; it is
        // initialised memory of this size, and the slice ends with this call.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.base.as_ptr(), buffer.layout.size()) };
        let mut blocks = bytes.chunks(slot_bytes.max(1) as usize);
        for tag in &check.tags {
            let Some(mut block) = blocks.next() else { return };
            for (plane, index) in planes.iter().zip(0..) {
                let Some((found, rest)) = block.split_at_checked(plane.bytes as usize) else {
                    return;
                };
                let seed = content::seed(*tag, layer_map.tensor, shard, index);
                self.verified += plane.bytes;
                self.mismatched += content::mismatches(seed, found);
                block = rest;
            }
        }
    }
}

/// The `index`-th layer that a row speaks for.
fn layer_of(map: &GeometryMap, row: &RowRecord, index: usize) -> Option<DecoderLayer> {
    if row.layer != ALL_LAYERS {
        return (index == 0).then_some(DecoderLayer(row.layer));
    }
    let layers = map.geometry().layers.iter().zip(0..);
    let mut of_group = layers.filter(|(layer, _)| layer.group == GroupId(row.group));
    of_group.nth(index).map(|(_, at)| DecoderLayer(at))
}
