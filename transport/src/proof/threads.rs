//! Plain memory that the protocol hands from thread to thread (X13, X14).
//!
//! Blocks are bytes without atomics. A producer fills a source that nobody leases, each rank copies it, and the producer
//! reads the destinations once the operation is Done, then uses the blocks again. So every ordering that the protocol
//! promises is one that Miri and ThreadSanitizer see: where it is missing, they report a data race. See
//! `tests/scripts/miri.sh` and `tests/scripts/tsan.sh`, which also plant the faults.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use kvsluice_layout::ids::{GroupId, PhysicalBlock, SourceBlock};
use kvsluice_layout::record::Terminal;

use super::StopAtEnd;
use crate::port::{Incoming, Outcome, Port};
use crate::producer::tests::{Bench, upload};
use crate::shared::Heap;

const ROUNDS: u64 = if cfg!(miri) { 6 } else { 4_000 };
const BLOCKS: usize = 64;
const RANKS: usize = 2;

/// One pool of blocks, a word each.
struct Pool([UnsafeCell<u64>; BLOCKS]);

// SAFETY: the protocol under test decides who may touch a block; that it does so without a race is what is shown.
unsafe impl Sync for Pool {}

impl Pool {
    fn new() -> Self {
        Self(std::array::from_fn(|_| UnsafeCell::new(0)))
    }

    fn read(&self, block: u32) -> u64 {
        // SAFETY: called for a block that this side has leased, or that nobody leases.
        unsafe { *self.0[block as usize].get() }
    }

    fn write(&self, block: u32, value: u64) {
        // SAFETY: as above, and nobody reads the block meanwhile.
        unsafe { *self.0[block as usize].get() = value }
    }
}

/// Copies until told to stop, answering out of order now and then.
fn work(mut port: Port<Heap, Heap>, host: &Pool, device: &Pool, stop: &AtomicBool) {
    let mut held = None;
    loop {
        let ticket = match port.receive() {
            Ok(Some(Incoming::Plan(ticket))) => ticket,
            Ok(None) if held.is_none() && stop.load(Ordering::Relaxed) => return,
            Ok(None) => {
                if let Some(ticket) = held.take() {
                    port.finish(ticket, &Outcome::done(8, 0, 0));
                }
                std::thread::yield_now();
                continue;
            }
            other => panic!("{other:?}"),
        };
        let plan = port.plan(&ticket).expect("accepted");
        for pair in plan.rows().iter().flat_map(|row| plan.pairs(row)) {
            device.write(pair.destination, host.read(pair.source));
        }
        if held.is_none() && ticket.position().0.is_multiple_of(192) {
            held = Some(ticket);
        } else {
            port.finish(ticket, &Outcome::done(8, 0, 0));
        }
    }
}

#[test]
fn x13_x14_blocks_without_atomics_pass_between_threads_by_the_protocol_alone() {
    let mut bench = Bench::new(RANKS as u32);
    let host = Pool::new();
    let devices: [Pool; RANKS] = std::array::from_fn(|_| Pool::new());
    let stop = AtomicBool::new(false);
    let producer = &mut bench.producer;
    std::thread::scope(|scope| {
        for (port, device) in bench.ports.into_iter().zip(&devices) {
            let (host, stop) = (&host, &stop);
            scope.spawn(move || {
                // A rank that fails ends the producer too, which would wait for its answers.
                let _stop = StopAtEnd(stop);
                work(port, host, device, stop);
            });
        }
        let _stop = StopAtEnd(&stop);
        let mut running = HashMap::new();
        let (mut published, mut done, mut next) = (0, 0, 0);
        while done < ROUNDS {
            assert!(!stop.load(Ordering::Relaxed), "a rank has failed");
            next = next % (BLOCKS as u32 - 1) + 1;
            let leases = producer.leases();
            let free = leases.source_leases(GroupId(0), SourceBlock(next)) == 0
                && leases.device_leases(GroupId(0), PhysicalBlock(next)) == 0;
            if free && published < ROUNDS {
                // X14: nobody leases the source, so it may be refilled.
                published += 1;
                host.write(next, published);
                let position = producer
                    .publish(&upload(published, &[(next, next)]))
                    .expect("free blocks, free ring");
                running.insert(position, (next, published));
            }
            producer.poll_thorough();
            let before = done;
            while let Some(completion) = producer.next_completion() {
                let (block, value) = running.remove(&completion.position).expect("published");
                assert_eq!(completion.terminal, Terminal::Done);
                for device in &devices {
                    assert_eq!(device.read(block), value, "Done is after every copy (X13)");
                }
                done += 1;
            }
            if before == done {
                std::thread::yield_now();
            }
        }
    });
}
