//! What attention would read, looked at after every change of a table (R67): a kernel on the compute queue follows the
//! device's own table to its blocks, and compares every byte with the content that the plans named.
//!
//! The kernel runs behind the change, and what would overwrite its blocks or its table waits for it, as for any reader
//! (X19, R57).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvsluice_layout::content;
use kvsluice_layout::export::RequestExport;
use kvsluice_layout::ids::{DecoderLayer, PhysicalBlock, Rank};
use kvsluice_layout::planes::GeometryMap;

use crate::device::TableSlot;
use crate::device::host::{HostEngine, KernelMemory, KernelState};
use crate::tables::{ROW_HEADER_WORDS, TableStore};

/// What the kernels have found. The sums are relaxed; the last decrement of `running` shows all of them.
#[derive(Debug, Default)]
struct Found {
    running: AtomicU64,
    verified: AtomicU64,
    mismatched: AtomicU64,
}

/// Looks through the tables of one worker's device.
pub(super) struct Audit {
    engine: HostEngine,
    map: Arc<GeometryMap>,
    rank: Rank,
    /// Digest of all tables, and by table of its request, when they were last looked through.
    digest: u64,
    seen: HashMap<TableSlot, u64>,
    found: Arc<Found>,
}

impl Audit {
    pub(super) fn new(engine: HostEngine, map: GeometryMap, rank: Rank) -> Self {
        Self {
            engine,
            map: Arc::new(map),
            rank,
            digest: 0,
            seen: HashMap::new(),
            found: Arc::default(),
        }
    }

    /// Launches a look through every table that has changed. Not while a Reset is open: the device's tables are emptied
    /// before the worker's are.
    pub(super) fn look(&mut self, tables: &TableStore) {
        if tables.digest() == self.digest {
            return;
        }
        let row_words = tables.spec().words / self.map.geometry().layers.len().max(1) as u32;
        let mut all = true;
        for view in tables.export() {
            let (slot, digest) = (view.slot(), view.digest());
            if self.seen.get(&slot) == Some(&digest) {
                continue;
            }
            if view.is_changing() {
                all = false; // the device's table may be the next one already
                continue;
            }
            let (map, found, rank) = (Arc::clone(&self.map), Arc::clone(&self.found), self.rank);
            let expected = view.to_export();
            self.found.running.fetch_add(1, Ordering::Relaxed);
            let launched = self.engine.launch(move |memory: &KernelMemory<'_>| {
                let (verified, mismatched) = follow(memory, &map, rank, slot, row_words, &expected);
                found.verified.fetch_add(verified, Ordering::Relaxed);
                found.mismatched.fetch_add(mismatched, Ordering::Relaxed);
                found.running.fetch_sub(1, Ordering::Release); // pairs with: is_idle
                KernelState::Finished
            });
            if launched.is_err() {
                // The compute queue is full: next time. A lost device is seen by the worker.
                self.found.running.fetch_sub(1, Ordering::Relaxed);
                all = false;
                break;
            }
            self.seen.insert(slot, digest);
        }
        if all {
            self.digest = tables.digest();
        }
    }

    /// True where every look has ended.
    pub(super) fn is_idle(&self) -> bool {
        self.found.running.load(Ordering::Acquire) == 0 // pairs with: look
    }

    /// Bytes compared, and bytes that were something else.
    pub(super) fn found(&self) -> (u64, u64) {
        let [verified, mismatched] = [&self.found.verified, &self.found.mismatched];
        (verified.load(Ordering::Relaxed), mismatched.load(Ordering::Relaxed))
    }
}

/// Verified and differing bytes of the blocks that the device's table in `slot` names. A word of the table that is not
/// what it should be counts as the block behind it.
fn follow(
    memory: &KernelMemory<'_>,
    map: &GeometryMap,
    rank: Rank,
    slot: TableSlot,
    row_words: u32,
    expected: &RequestExport,
) -> (u64, u64) {
    let (mut verified, mut mismatched) = (0, 0);
    let view = memory.table(slot);
    let mut bytes = Vec::new();
    for (layer, spec) in (0..).zip(&map.geometry().layers) {
        let Some((table, of)) = expected
            .table(DecoderLayer(layer), spec.group)
            .zip(map.layer(DecoderLayer(layer)))
        else {
            continue;
        };
        let word = |index: u32| view.and_then(|view| memory.word(view, layer * row_words + index));
        let shard = rank.0 * of.shards / map.geometry().ranks;
        for (at, tag) in (0..).zip(&table.tags) {
            let block = word(1)
                .filter(|count| at < *count)
                .and_then(|_| word(ROW_HEADER_WORDS + at));
            for (plane, index) in map.planes(rank, DecoderLayer(layer)).iter().zip(0..) {
                bytes.resize(plane.bytes as usize, 0);
                let from = block.map(|block| plane.device_at(PhysicalBlock(block).into()));
                let is_read = from.is_some_and(|from| memory.read(from, &mut bytes).is_ok());
                let seed = content::seed(*tag, of.tensor, shard, index);
                verified += plane.bytes;
                mismatched += if is_read {
                    content::mismatches(seed, &bytes)
                } else {
                    plane.bytes
                };
            }
        }
    }
    (verified, mismatched)
}
