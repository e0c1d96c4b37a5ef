//! The baselines: what the two cores cost without any of the product.
//!
//! The same mappings, the same word-wise copies and the same two cores as the product, and nothing else: no header, no
//! checksum, no lease, no answer per record.

use anyhow::Result;
use kvsluice_transport::segment::{Mapping, MappingMut};
use kvsluice_transport::shared::{Shared, SharedMut};

use super::link::{Link, PING_AT, PONG_AT, STREAM_AT, TAKEN_AT};

/// Records per batch, of the baseline and of the product alike.
pub(super) const BATCH: u64 = 32;

/// One round trip of one cache line: store, and wait for the peer to store the same.
#[inline]
pub(super) fn ping(link: &mut Link, number: u64) -> Result<()> {
    let Link {
        down, up, up_at, peer, ..
    } = link;
    down.store_release(PING_AT, number); // pairs with: pong
    peer.wait(|| up.load_acquire(*up_at + PONG_AT) == number) // pairs with: pong
}

/// The peer's side of [`ping`], `count` times.
pub(super) fn pong(down: &Mapping, up: &MappingMut, up_at: usize, count: u64) {
    let mut answered = up.load(up_at + PONG_AT);
    for _ in 0..count {
        let mut number = down.load_acquire(PING_AT); // pairs with: ping
        while number == answered {
            number = down.load_acquire(PING_AT);
        }
        up.store_release(up_at + PONG_AT, number); // pairs with: ping
        answered = number;
    }
}

/// Writes records into the bare stream: a commit word and then bytes, as in the plan ring.
pub(super) struct Sender {
    index: u64,
    ring_bytes: usize,
    /// Never a commit word, so that no size of record finds one in what another size left behind.
    record: Vec<u64>,
}

impl Sender {
    pub(super) fn new(ring_bytes: usize) -> Self {
        Self {
            index: 0,
            ring_bytes,
            record: vec![u64::MAX; ring_bytes / 8],
        }
    }

    /// Sends `count` records of `bytes` bytes and waits until the peer has taken the last.
    pub(super) fn send(&mut self, link: &mut Link, count: u64, bytes: usize) -> Result<()> {
        let Link {
            down, up, up_at, peer, ..
        } = link;
        let body = &self.record[1..bytes / 8];
        let slots = (self.ring_bytes / bytes) as u64;
        let taken_at = *up_at + TAKEN_AT;
        let mut free = 0;
        let end = self.index + count;
        while self.index != end {
            let batch = BATCH.min(end - self.index).min(slots / 2);
            if free < batch {
                // pairs with: Taker::take
                peer.wait(|| {
                    free = slots - (self.index - up.load_acquire(taken_at));
                    free >= batch
                })?;
            }
            free -= batch;
            for index in (self.index..self.index + batch).rev() {
                let at = STREAM_AT + (index % slots) as usize * bytes;
                down.copy_in(at + 8, body);
                down.store_release(at, index + 1); // pairs with: Taker::take. The first of the batch comes last.
            }
            self.index += batch;
        }
        peer.wait(|| up.load_acquire(taken_at) == end)
    }
}

/// Reads records from the bare stream.
pub(super) struct Taker {
    index: u64,
    ring_bytes: usize,
    record: Vec<u64>,
}

impl Taker {
    pub(super) fn new(ring_bytes: usize) -> Self {
        Self {
            index: 0,
            ring_bytes,
            record: vec![0; ring_bytes / 8],
        }
    }

    /// Takes `count` records of `bytes` bytes; tells the sender after each `batch` of them.
    pub(super) fn take(&mut self, down: &Mapping, up: &MappingMut, up_at: usize, count: u64, bytes: usize, batch: u64) {
        let slots = (self.ring_bytes / bytes) as u64;
        for left in (0..count).rev() {
            let at = STREAM_AT + (self.index % slots) as usize * bytes;
            while down.load_acquire(at) != self.index + 1 {} // pairs with: Sender::send
            down.copy_out(at + 8, &mut self.record[1..bytes / 8]);
            self.index += 1;
            if left % batch == 0 {
                up.store_release(up_at + TAKEN_AT, self.index); // pairs with: Sender::send
            }
        }
    }
}
