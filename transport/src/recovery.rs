//! Taking over from a dead producer (X25): what is in flight is read from the journal, and nothing else is needed.
//!
//! The records in [reclaim, tail) and the terminal slots are all of it. The tail is the first uncommitted word; what
//! lies behind it was never published. Every lease of a record read is held until all ranks are terminal for it, and
//! nothing that the journal holds is published again.

use kvsluice_layout::checksum::checksum;
use kvsluice_layout::ids::{Incarnation, PoolGeneration, Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{HEADER_BYTES, Kind, LINE_BYTES, LINE_WORDS};
use kvsluice_layout::refusal::Refusal;
use kvsluice_layout::region::{GENERATION_AT, INCARNATION_AT, PRODUCER_EPOCH_AT, RECLAIM_AT, RegionMap};
use thiserror::Error;

use crate::members::{Member, read_member, write_member};
use crate::producer::Producer;
use crate::ring::{PlanWriter, RingShape};
use crate::shared::{Shared, SharedMut};

/// A journal that cannot be read: the channel starts cold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum TakeoverError {
    /// A position that no producer stores.
    #[error("journal: reclaim is {found}: expected a multiple of {LINE_BYTES}: start the channel cold")]
    Reclaim {
        /// The word found.
        found: u64,
    },
    /// A record that no producer writes.
    #[error("journal: record at {position}: {what}, found {found:#x}: start the channel cold")]
    Record {
        /// Position of the record.
        position: Position,
        /// What is wrong.
        what: &'static str,
        /// The word found.
        found: u64,
    },
    /// A record whose parts disagree.
    #[error("journal: record at {position}: {refusal}: start the channel cold")]
    Refused {
        /// Position of the record.
        position: Position,
        /// Why.
        refusal: Refusal,
    },
}

/// A record of the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Journaled {
    /// Position of the record.
    pub position: Position,
    /// Bytes of the record.
    pub bytes: u64,
    /// Kind of the record.
    pub kind: Kind,
}

/// Reads [reclaim, tail) of a journal: calls `visit` with each record and a private copy of it (one line of a padding),
/// and returns (reclaim, tail).
///
/// # Errors
/// [`TakeoverError`] at the first record that no producer writes.
pub fn scan<M: Shared>(
    control: &M,
    shape: RingShape,
    mut visit: impl FnMut(Journaled, &[u64]) -> Result<(), TakeoverError>,
) -> Result<(Position, Position), TakeoverError> {
    let reclaim = control.load_acquire(RECLAIM_AT); // pairs with: ring::PlanWriter::store_record
    if !reclaim.is_multiple_of(LINE_BYTES as u64) || reclaim > u64::MAX / 2 {
        return Err(TakeoverError::Reclaim { found: reclaim });
    }
    let end = reclaim + shape.bytes as u64;
    let mut copy = vec![0_u64; shape.bytes / 8];
    let mut at = reclaim;
    while at < end {
        let offset = shape.offset(at);
        let shared = shape.at + offset;
        if control.load_acquire(shared) != at + 1 {
            break; // pairs with: ring::PlanWriter::commit
        }
        let position = Position(at);
        control.copy_out(shared, &mut copy[..LINE_WORDS]);
        copy[0] = at + 1;
        let word = copy[2];
        let record = |what, found| TakeoverError::Record { position, what, found };
        let bytes = word & 0xffff_ffff;
        let kind = Kind::from_code((word >> 32) as u16).ok_or_else(|| record("kind", word))?;
        let least = if kind == Kind::Padding {
            LINE_BYTES
        } else {
            HEADER_BYTES
        } as u64;
        let to_end = (shape.bytes - offset) as u64;
        if bytes < least || bytes > to_end || !bytes.is_multiple_of(LINE_BYTES as u64) || at + bytes > end {
            return Err(record("length", word));
        }
        let copied = if kind == Kind::Padding {
            LINE_WORDS
        } else {
            bytes as usize / 8
        };
        control.copy_out(shared + LINE_BYTES, &mut copy[LINE_WORDS..copied]);
        let [commit, sum, behind @ ..] = &copy[..copied] else {
            break;
        };
        if *sum != checksum(*commit, behind) {
            return Err(record("checksum", *sum));
        }
        visit(Journaled { position, bytes, kind }, &copy[..copied])?;
        at += bytes;
    }
    Ok((Position(reclaim), Position(at)))
}

impl<C: SharedMut, R: Shared> Producer<C, R> {
    /// Takes over the channel of a producer that is proven dead. `survivors` are the rank segments of the workers that
    /// are alive, each with its worker's epoch and pid; the other ranks have lost what they owed.
    ///
    /// The journal is read before anything is stored, and the new incarnation is the first word stored, so a takeover
    /// that dies at any store leaves a channel that the next one can take over.
    ///
    /// # Errors
    /// [`TakeoverError`]: the journal cannot be trusted; the channel must start cold.
    pub fn take_over(
        control: C,
        map: RegionMap,
        leases: LeaseTable,
        epoch: ProcessEpoch,
        survivors: Vec<(Rank, R, ProcessEpoch, u32)>,
    ) -> Result<Self, TakeoverError> {
        let shape = RingShape {
            at: map.ring_at(),
            bytes: map.ring_bytes(),
        };
        let mut journal = Vec::new();
        let mut generation = PoolGeneration(control.load(GENERATION_AT));
        let (reclaim, tail) = scan(&control, shape, |record, words| {
            if record.kind != Kind::Padding {
                let plan = Plan::parse_checked_before(words).map_err(|refusal| TakeoverError::Refused {
                    position: record.position,
                    refusal,
                })?;
                if plan.kind() == Kind::Reset {
                    // X24a: its producer may have died before it stored the generation that it published.
                    generation = generation.max(plan.operation().pool_generation);
                }
            }
            journal.push((record, words.to_vec()));
            Ok(())
        })?;
        let incarnation = Incarnation(control.load(INCARNATION_AT).saturating_add(1));
        if planted("x25_incarnation_late") {
            control.store(PRODUCER_EPOCH_AT, epoch.0);
        }
        control.store_release(INCARNATION_AT, incarnation.0); // X25: before any other word
        control.store(PRODUCER_EPOCH_AT, epoch.0);
        let mut writer = PlanWriter::new(control, shape, RECLAIM_AT, reclaim.0, tail.0);
        for (record, words) in &journal {
            writer.fill_mirror(record.position, words);
        }
        let mut producer = Self::assemble(map, writer, leases, epoch, generation);
        for (rank, segment, worker, pid) in survivors {
            let member = read_member(producer.control(), producer.map(), rank);
            if member.epoch == worker {
                producer.seat(rank, segment, member, pid);
            }
        }
        for rank in (0..producer.map().ranks()).map(Rank) {
            if producer.segment(rank).is_none() {
                write_member(producer.control(), producer.map(), rank, Member::MISSING);
            }
        }
        for (record, _) in journal {
            producer.track_journaled(record);
        }
        producer.complete_unowed();
        producer.poll_thorough();
        producer.disown_answers();
        Ok(producer)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "recovery_tests.rs"]
mod tests;
