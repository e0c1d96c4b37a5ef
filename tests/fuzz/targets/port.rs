//! `Port::receive` over a ring of any bytes. The first byte says which records the producer takes the trouble to seal, the
//! second which ones the worker leaves open.
#![no_main]

use std::cell::RefCell;

use kvsluice_fuzz::{assert_sound, geometry, words};
use kvsluice_layout::ids::{Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::seal;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap};
use kvsluice_transport::port::{Incoming, Outcome, Port};
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::shared::{Heap, SharedMut};
use libfuzzer_sys::fuzz_target;

const PRODUCER: u64 = 1;

struct Channel {
    map: GeometryMap,
    shape: RingShape,
    control: Heap,
    rank: Heap,
}

thread_local! {
    static CHANNEL: RefCell<Channel> = RefCell::new({
        let map = geometry();
        let regions = RegionMap::new(map.geometry(), MIN_RING_BYTES, 0, 64).expect("sizes");
        Channel {
            shape: RingShape { at: regions.ring_at(), bytes: regions.ring_bytes() },
            control: Heap::new(regions.control_bytes()),
            rank: Heap::new(regions.rank_bytes()),
            map,
        }
    });
}

/// Makes records of the lines at their own lengths, so that the port gets past framing and checksum.
fn dress(ring: &mut [u64], sealed: u8) {
    let mut at = 0;
    for record in 0.. {
        let Some(line) = ring.get_mut(at..at + 8) else { return };
        if sealed >> (record % 8) & 1 == 1 {
            line[0] = at as u64 * 8 + 1;
            line[4] = PRODUCER;
        }
        let bytes = (line[2] as u32 as usize).next_multiple_of(64).clamp(64, 4096);
        if sealed >> (record % 8) & 1 == 1 {
            line[2] = line[2] & !0xFFFF_FFFF | bytes as u64;
        }
        let end = (at + bytes / 8).min(ring.len());
        if sealed >> (record % 8) & 1 == 1 {
            seal(&mut ring[at..end]);
        }
        at = end;
    }
}

fuzz_target!(|data: &[u8]| {
    let [sealed, open, lines @ ..] = data else { return };
    CHANNEL.with_borrow(|channel| {
        let mut ring = words(lines);
        ring.resize(ring.len().next_multiple_of(8).min(channel.shape.bytes / 8), 0);
        dress(&mut ring, *sealed);
        channel.control.copy_in(channel.shape.at, &ring);
        let leases = LeaseTable::new(&channel.map);
        let (epoch, producer) = (ProcessEpoch(2), ProcessEpoch(PRODUCER));
        let (control, rank) = (channel.control.clone(), channel.rank.clone());
        let mut port = Port::new(control, rank, channel.shape, leases, epoch, producer, Position(0));
        let mut held = Vec::new();
        for record in 0..64 {
            match port.receive() {
                Ok(Some(Incoming::Plan(ticket))) => {
                    let plan = port.plan(&ticket).expect("an accepted plan stays one");
                    assert_sound(&channel.map, &plan);
                    if open >> (record % 8) & 1 == 1 {
                        held.push(ticket);
                    } else {
                        port.finish(ticket, &Outcome::done(0, 0, 0));
                    }
                }
                Ok(Some(Incoming::Rejected { .. })) => {}
                Ok(Some(Incoming::AwaitHandshake(_)) | None) | Err(_) => break,
            }
        }
        for ticket in held {
            let plan = port.plan(&ticket).expect("an open record stays as it was");
            assert_sound(&channel.map, &plan);
            port.finish(ticket, &Outcome::done(0, 0, 0));
        }
        assert_eq!(port.unanswered(), 0);
        // The next input starts on an empty ring.
        ring.fill(0);
        channel.control.copy_in(channel.shape.at, &ring);
    });
});
