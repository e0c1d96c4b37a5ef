//! The channel on the heap that the targets of shared memory decode: a tiny geometry with every feature at once.

use std::ops::Range;

use kvsluice_layout::ids::ProcessEpoch;
use kvsluice_layout::plan::seal;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::{Kind, LINE_WORDS};
use kvsluice_layout::region::{CONSUMED_AT, INCARNATION_AT, MEMBERSHIP_AT, MIN_RING_BYTES, RegionMap, SLOTS_AT};
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::shared::{Heap, Shared};

/// Whose records a port takes, and whose journal is taken over.
pub(super) const PRODUCER: ProcessEpoch = ProcessEpoch(1);
pub(super) const RANKS: u32 = 2;
/// Bytes of the ring, and of the slots that answer to them, that an input may fill.
pub(super) const USED_BYTES: usize = 2048;
/// Bytes of single words in front of both kinds of segment.
const WORDS_BYTES: usize = 512;
const _: () = assert!(CONSUMED_AT < INCARNATION_AT + WORDS_BYTES);

pub(super) struct Channel {
    pub(super) map: GeometryMap,
    pub(super) regions: RegionMap,
    pub(super) shape: RingShape,
    pub(super) control: Heap,
    pub(super) ranks: [Heap; RANKS as usize],
}

impl Channel {
    pub(super) fn new() -> Self {
        let sizing = Sizing {
            ranks: Some(RANKS),
            ..Sizing::default()
        };
        let geometry = sizing.apply(preset("sample-hybrid").expect("a preset"));
        let map = GeometryMap::new(&geometry.expect("sizes")).expect("a valid geometry");
        let regions = RegionMap::new(map.geometry(), MIN_RING_BYTES, 0, 64).expect("sizes");
        Self {
            shape: RingShape {
                at: regions.ring_at(),
                bytes: regions.ring_bytes(),
            },
            control: Heap::new(regions.control_bytes()),
            ranks: [(); RANKS as usize].map(|()| Heap::new(regions.rank_bytes())),
            map,
            regions,
        }
    }

    /// What an input may change in the control segment: words, members of both ranks, the ring's begin.
    pub(super) fn control_places(&self) -> [Range<usize>; 3] {
        [
            INCARNATION_AT..INCARNATION_AT + WORDS_BYTES,
            MEMBERSHIP_AT..MEMBERSHIP_AT + 64 * RANKS as usize,
            self.shape.at..self.shape.at + USED_BYTES,
        ]
    }

    /// What an input may change in a rank's segment: words, the first slots.
    pub(super) fn rank_places() -> [Range<usize>; 2] {
        [
            INCARNATION_AT..INCARNATION_AT + WORDS_BYTES,
            SLOTS_AT..SLOTS_AT + USED_BYTES,
        ]
    }

    /// Makes the channel as it was when it was new. For a channel that no other thread uses.
    pub(super) fn clear(&self) {
        for place in self.control_places() {
            zero(&self.control, place);
        }
        for rank in &self.ranks {
            Self::rank_places().into_iter().for_each(|place| zero(rank, place));
        }
    }
}

/// Word by word this would be half of an input's time.
fn zero(memory: &Heap, place: Range<usize>) {
    assert!(place.start <= place.end && place.end <= memory.size());
    // SAFETY: the bytes lie in the memory, and no other thread looks at them.
    unsafe { memory.base().add(place.start).write_bytes(0, place.len()) }
}

/// The first words of a segment.
pub(super) fn first_words(memory: &Heap, bytes: usize) -> Vec<u64> {
    assert!(bytes <= memory.size());
    // SAFETY: as many words lie in the memory, aligned, and no other thread writes them.
    unsafe { std::slice::from_raw_parts(memory.base().cast::<u64>(), bytes / 8) }.to_vec()
}

/// Makes records of the lines, the first at `position`, at their own lengths: with the commit word, the epoch, a length
/// and the checksum that a fuzzer does not guess. Bit i of `sealed`: whether the i-th record is helped so.
pub(super) fn dress(lines: &mut [u64], position: u64, sealed: u8) {
    let mut at = 0;
    for record in 0.. {
        let Some(line) = lines.get_mut(at..at + 8) else { return };
        let helped = sealed >> (record % 8) & 1 == 1;
        let bytes = (line[2] as u32 as usize).next_multiple_of(64).clamp(64, 4096);
        let end = (at + bytes / 8).min(lines.len());
        if helped {
            let line = &mut lines[at..end];
            line[0] = position + at as u64 * 8 + 1;
            line[4] = PRODUCER.0;
            // X24a: the generation of a port that has read no Reset; a Reset keeps its own.
            if (line[2] >> 32) as u16 != Kind::Reset as u16 && line.len() > LINE_WORDS {
                line[7] = 0;
            }
            line[2] = line[2] & !0xFFFF_FFFF | (line.len() * 8) as u64;
            seal(line);
        }
        at = end;
    }
}
