//! From block ids to copies: the fragments of a plan, merged where they are adjacent on both sides (D4).
//!
//! A row names blocks; a plane says where a block lies. [`CopyPlanner`] walks the planes of a row and turns each run of
//! blocks that is contiguous in both pools into one fragment, never across the end of a pinned chunk (field bug 12).
//! It keeps its memory between plans, so that a plan of a usual size allocates nothing (P8).

use std::ops::Range;

use kvsluice_layout::planes::{GeometryMap, Plane};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::Pair;
use thiserror::Error;

use crate::device::{Fragment, RegionId};

/// Host memory as copies see it: a registered region and where its pinned chunks end.
#[derive(Clone, Debug)]
pub struct HostPool {
    region: RegionId,
    chunk_ends: Vec<u64>,
}

impl HostPool {
    /// The region that was registered with these chunk ends.
    pub fn new(region: RegionId, chunk_ends: &[u64]) -> Self {
        Self {
            region,
            chunk_ends: chunk_ends.to_vec(),
        }
    }

    /// Bytes from `offset` that one fragment may cover: up to the end of its chunk.
    fn reach(&self, offset: u64) -> u64 {
        if planted("merge_across_chunks") {
            return u64::MAX;
        }
        let chunk = match self.chunk_ends.as_slice() {
            [_] => 0,
            ends => ends.partition_point(|&end| end <= offset),
        };
        // Behind the last chunk there is no memory: the device refuses what is emitted there.
        self.chunk_ends
            .get(chunk)
            .map_or(u64::MAX, |end| end.saturating_sub(offset))
    }
}

/// Why a pool cannot be cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no block boundary within {chunk_bytes_max} bytes after pool byte {from}; raise the chunk size (X31)")]
pub struct ChunkError {
    /// Where the chunk that does not end begins.
    pub from: u64,
    /// Largest chunk asked for.
    pub chunk_bytes_max: u64,
}

/// Cuts the pool of `map` into chunks of at most `chunk_bytes_max` bytes that end between two blocks, on a page (X31):
/// the chunk ends for [`Device::register`](crate::device::Device::register).
pub fn pool_chunk_ends(map: &GeometryMap, chunk_bytes_max: u64) -> Result<Vec<u64>, ChunkError> {
    let mut ends = Vec::new();
    let mut from = 0;
    while from < map.pool_bytes() {
        let end = map.cut_at_or_below(from.saturating_add(chunk_bytes_max));
        if end <= from {
            return Err(ChunkError { from, chunk_bytes_max });
        }
        ends.push(end);
        from = end;
    }
    Ok(ends)
}

/// What a plan came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Blocks of one plane: what there would be to copy without merging.
    pub pieces: u64,
    /// Fragments after merging.
    pub fragments: u64,
    /// Bytes of all fragments.
    pub bytes: u64,
}

/// Builds the fragments of one plan at a time.
#[derive(Debug, Default)]
pub struct CopyPlanner {
    fragments: Vec<Fragment>,
    counts: CopyCounts,
}

impl CopyPlanner {
    /// A planner with room for `fragments`; a larger plan makes it grow, once.
    pub fn with_capacity(fragments: usize) -> Self {
        Self {
            fragments: Vec::with_capacity(fragments),
            counts: CopyCounts::default(),
        }
    }

    /// Forgets the last plan and keeps its memory.
    pub fn clear(&mut self) {
        self.fragments.clear();
        self.counts = CopyCounts::default();
    }

    /// All fragments of the plan so far.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// The fragments in `range`, which one of the methods below returned.
    pub fn row(&self, range: Range<usize>) -> &[Fragment] {
        self.fragments.get(range).unwrap_or(&[])
    }

    /// What the plan came to so far.
    pub fn counts(&self) -> CopyCounts {
        CopyCounts {
            fragments: self.fragments.len() as u64,
            ..self.counts
        }
    }

    /// Adds a row of an upload: (source block, physical block) in every plane of the row's layer. Ids are validated
    /// before (X9); one that is not is refused by the device, not followed. Returns the row's fragments.
    pub fn upload(&mut self, pool: &HostPool, planes: &[Plane], pairs: &[Pair]) -> Range<usize> {
        let start = self.fragments.len();
        let region = pool.region;
        each_fused(planes, |plane| {
            let packed = plane.host_stride == plane.bytes && plane.device_stride == plane.bytes;
            let mut rest = pairs;
            while let Some(first) = rest.first() {
                let host = at(plane.host_offset, plane.host_stride, first.source);
                let device = at(plane.device_offset, plane.device_stride, first.destination);
                let most = if packed {
                    blocks_within(pool.reach(host), plane.bytes)
                } else {
                    1
                };
                let blocks = run(rest, most);
                let bytes = plane.bytes.saturating_mul(blocks as u64);
                self.push(Fragment::Upload {
                    region,
                    host,
                    device,
                    bytes,
                });
                rest = rest.get(blocks..).unwrap_or(&[]);
            }
        });
        self.count(planes, pairs, start)
    }

    /// Adds a row of a write-back: physical blocks of every plane into the staging slots of `area`, in pair order from
    /// byte `first` of the area, `slot_bytes` apart, the planes of one block in a row. Returns the row's fragments.
    pub fn write_back(
        &mut self,
        area: &HostPool,
        first: u64,
        slot_bytes: u64,
        planes: &[Plane],
        pairs: &[Pair],
    ) -> Range<usize> {
        let start = self.fragments.len();
        let region = area.region;
        let mut in_slot = 0;
        each_fused(planes, |plane| {
            let mut host = first.saturating_add(in_slot);
            for pair in pairs {
                let device = at(plane.device_offset, plane.device_stride, pair.source);
                self.push(Fragment::WriteBack {
                    region,
                    host,
                    device,
                    bytes: plane.bytes,
                });
                host = host.saturating_add(slot_bytes);
            }
            in_slot += plane.bytes;
        });
        self.count(planes, pairs, start)
    }

    /// Adds moves inside the device pool: (physical block read, physical block written) in every plane. The moves are
    /// free of hazards: one batch of [`MoveOrder`](crate::moves::MoveOrder). Returns their fragments.
    pub fn moves(&mut self, planes: &[Plane], pairs: &[Pair]) -> Range<usize> {
        let start = self.fragments.len();
        each_fused(planes, |plane| {
            let packed = plane.device_stride == plane.bytes;
            let mut rest = pairs;
            while let Some(first) = rest.first() {
                let from = at(plane.device_offset, plane.device_stride, first.source);
                let to = at(plane.device_offset, plane.device_stride, first.destination);
                let blocks = run(rest, if packed { usize::MAX } else { 1 });
                self.push(Fragment::Move {
                    from,
                    to,
                    bytes: plane.bytes.saturating_mul(blocks as u64),
                });
                rest = rest.get(blocks..).unwrap_or(&[]);
            }
        });
        self.count(planes, pairs, start)
    }

    fn push(&mut self, fragment: Fragment) {
        self.counts.bytes = self.counts.bytes.saturating_add(fragment.bytes());
        self.fragments.push(fragment);
    }

    fn count(&mut self, planes: &[Plane], pairs: &[Pair], start: usize) -> Range<usize> {
        self.counts.pieces += planes.len() as u64 * pairs.len() as u64;
        start..self.fragments.len()
    }
}

/// Calls `act` with the planes, those that lie side by side in every block of both pools fused into one: K and V of a
/// block-first pool.
fn each_fused(planes: &[Plane], mut act: impl FnMut(&Plane)) {
    let mut planes = planes.iter().copied().peekable();
    while let Some(mut plane) = planes.next() {
        while let Some(next) = planes.next_if(|next| abuts(&plane, next)) {
            plane.bytes += next.bytes;
        }
        act(&plane);
    }
}

fn abuts(plane: &Plane, next: &Plane) -> bool {
    next.host_offset == plane.host_offset + plane.bytes
        && next.device_offset == plane.device_offset + plane.bytes
        && next.host_stride == plane.host_stride
        && next.device_stride == plane.device_stride
        // Still inside one block: a plane of one block is followed by the next block of the same plane otherwise.
        && plane.bytes + next.bytes <= plane.host_stride.min(plane.device_stride)
}

/// Where a block lies; saturates, since the device refuses what is out of bounds.
fn at(offset: u64, stride: u64, block: u32) -> u64 {
    offset.saturating_add(stride.saturating_mul(u64::from(block)))
}

/// Whole blocks in `bytes`, at least the one that is copied in any case.
fn blocks_within(bytes: u64, block_bytes: u64) -> usize {
    bytes
        .checked_div(block_bytes)
        .and_then(|blocks| usize::try_from(blocks).ok())
        .unwrap_or(1)
        .max(1)
}

/// Length of the run at the start of `pairs`, at most `most` and at least 1: both ids go up by one.
fn run(pairs: &[Pair], most: usize) -> usize {
    let next = |(a, b): (&Pair, &Pair)| {
        b.source.wrapping_sub(a.source) == 1
            && (b.destination.wrapping_sub(a.destination) == 1 || planted("merge_one_side"))
    };
    let behind = pairs.iter().zip(pairs.iter().skip(1)).take(most.saturating_sub(1));
    1 + behind.take_while(|&pair| next(pair)).count()
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::device::adversary::Adversary;
    use crate::device::host::HostDevice;
    use crate::device::{Access, Device, DeviceSpec, HostSpan, TableSpec};

    fn plane(host_offset: u64, host_stride: u64, device_offset: u64, device_stride: u64, bytes: u64) -> Plane {
        Plane {
            host_offset,
            host_stride,
            device_offset,
            device_stride,
            bytes,
        }
    }

    fn pairs(ids: &[(u32, u32)]) -> Vec<Pair> {
        ids.iter()
            .map(|&(source, destination)| Pair { source, destination })
            .collect()
    }

    /// A region handle: of a device that is gone, since planning never follows it.
    fn region() -> RegionId {
        let spec = DeviceSpec::allocate(64, TableSpec { slots: 1, words: 1 });
        let mut device = HostDevice::stepped(spec, Adversary::default()).unwrap();
        // SAFETY: never copied from; the device is dropped before the span's promise matters.
        let span = unsafe { HostSpan::new(std::ptr::dangling_mut(), 8, Access::ReadOnly) };
        device.register_all(span, &[8]).unwrap()
    }

    /// The bytes that fragments move, as (host, device) pairs: what the reference below computes block by block.
    fn moved(fragments: &[Fragment]) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for fragment in fragments {
            match *fragment {
                Fragment::Upload {
                    host, device, bytes, ..
                }
                | Fragment::WriteBack {
                    host, device, bytes, ..
                } => {
                    all.extend((0..bytes).map(|n| (host + n, device + n)));
                }
                Fragment::Move { from, to, bytes } => all.extend((0..bytes).map(|n| (from + n, to + n))),
            }
        }
        all.sort_unstable();
        all
    }

    /// The reference: one byte at a time.
    fn byte_by_byte(planes: &[Plane], pairs: &[Pair]) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for plane in planes {
            for pair in pairs {
                let host = plane.host_offset + u64::from(pair.source) * plane.host_stride;
                let device = plane.device_offset + u64::from(pair.destination) * plane.device_stride;
                all.extend((0..plane.bytes).map(|n| (host + n, device + n)));
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn d4_runs_that_are_adjacent_on_both_sides_are_merged() {
        let pool = HostPool::new(region(), &[1 << 20]);
        let mut planner = CopyPlanner::with_capacity(8);
        let ids = pairs(&[(4, 10), (5, 11), (6, 12), (8, 13), (9, 15), (9, 16)]);
        let row = planner.upload(&pool, &[plane(0, 16, 1000, 16, 16)], &ids);
        let lengths: Vec<_> = planner.row(row).iter().map(Fragment::bytes).collect();
        assert_eq!(lengths, [48, 16, 16, 16]);
        assert_eq!(
            planner.counts(),
            CopyCounts {
                pieces: 6,
                fragments: 4,
                bytes: 96
            }
        );
        // A stride on either side keeps blocks apart; K and V of a block-first pool become one piece.
        for (host_stride, device_stride) in [(17, 16), (16, 17)] {
            let row = planner.upload(&pool, &[plane(0, host_stride, 0, device_stride, 16)], &ids);
            assert_eq!(planner.row(row).len(), 6);
        }
        let key_value = [plane(0, 32, 1000, 32, 16), plane(16, 32, 1016, 32, 16)];
        let row = planner.upload(&pool, &key_value, &ids);
        let lengths: Vec<_> = planner.row(row).iter().map(Fragment::bytes).collect();
        assert_eq!(lengths, [96, 32, 32, 32]);
    }

    #[test]
    fn d4_merging_moves_the_same_bytes_as_block_by_block() {
        let run = |seed: u64| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let bytes = rng.u64(1..5);
            let count = rng.u64(1..4);
            let [host_stride, device_stride] =
                [(); 2].map(|()| bytes * if rng.bool() { 1 } else { count + rng.u64(0..2) });
            let places = |stride: u64| move |n: u64| if stride >= bytes * count { n * bytes } else { n * 4000 };
            let (host, device) = (places(host_stride), places(device_stride));
            let planes: Vec<_> = (0..count)
                .map(|n| plane(host(n), host_stride, device(n), device_stride, bytes))
                .collect();
            let mut source = 0;
            let mut destinations: Vec<u32> = (0..64).collect();
            if rng.bool() {
                rng.shuffle(&mut destinations);
            }
            let ids: Vec<_> = destinations
                .into_iter()
                .take(rng.usize(0..40))
                .map(|destination| {
                    source += if rng.u8(0..4) == 0 { 2 } else { 1 };
                    Pair { source, destination }
                })
                .collect();
            // Chunks end between two blocks: cut only where the one plane is packed.
            let ends: Vec<_> = match (host_stride == bytes && count == 1).then(|| rng.u64(1..20) * bytes) {
                Some(chunk) => (1..)
                    .map(|n| n * chunk)
                    .take_while(|&end| end < 900)
                    .chain([1 << 20])
                    .collect(),
                None => vec![1 << 20],
            };
            let pool = HostPool::new(region(), &ends);
            let mut planner = CopyPlanner::default();
            planner.upload(&pool, &planes, &ids);
            let crossing = planner.fragments().iter().any(|fragment| match *fragment {
                Fragment::Upload { host, bytes, .. } => ends.iter().any(|&end| host < end && host + bytes > end),
                _ => true,
            });
            moved(planner.fragments()) == byte_by_byte(&planes, &ids) && !crossing
        };
        for seed in 0..300 {
            assert!(run(seed), "seed {seed}");
        }
        for fault in ["merge_one_side", "merge_across_chunks"] {
            assert!(
                with_planted(fault, || (0..300).any(|seed| !run(seed))),
                "{fault} goes unnoticed"
            );
        }
    }

    #[test]
    fn x6_a_write_back_packs_the_planes_of_a_block_into_its_slot() {
        let area = HostPool::new(region(), &[1 << 20]);
        let mut planner = CopyPlanner::default();
        let planes = [plane(0, 8, 0, 8, 8), plane(800, 4, 400, 4, 4)];
        let row = planner.write_back(&area, 64, 64, &planes, &pairs(&[(3, 70), (1, 71)]));
        let expected = [(64, 24, 8), (128, 8, 8), (72, 412, 4), (136, 404, 4)];
        let region = area.region;
        let expected = expected.map(|(host, device, bytes)| Fragment::WriteBack {
            region,
            host,
            device,
            bytes,
        });
        assert_eq!(planner.row(row), expected);
    }

    #[test]
    fn p8_a_planner_that_is_cleared_keeps_its_memory() {
        let pool = HostPool::new(region(), &[1 << 20]);
        let mut planner = CopyPlanner::with_capacity(64);
        let before = planner.fragments.capacity();
        for _ in 0..10 {
            planner.clear();
            let ids: Vec<_> = (0..64).map(|n| (n, 63 - n)).collect();
            planner.upload(&pool, &[plane(0, 16, 0, 16, 16)], &pairs(&ids));
        }
        assert_eq!((planner.fragments.len(), planner.fragments.capacity()), (64, before));
    }

    #[test]
    fn x31_chunks_of_every_preset_end_between_blocks_and_cover_the_pool() {
        use kvsluice_layout::presets;
        for name in presets::names() {
            let map = GeometryMap::new(&presets::preset(name).unwrap()).unwrap();
            let most = (map.pool_bytes() / 5).max(1 << 22);
            let ends = pool_chunk_ends(&map, most).unwrap();
            assert_eq!(ends.last(), Some(&map.pool_bytes()));
            let starts = [0].into_iter().chain(ends.iter().copied());
            assert!(
                starts
                    .zip(&ends)
                    .all(|(start, end)| end - start <= most && start < *end)
            );
        }
    }
}
