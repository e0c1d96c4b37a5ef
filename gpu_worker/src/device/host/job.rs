//! Jobs: what a host device runs without its lock, and how fragments become addresses and pieces.

use std::collections::VecDeque;

use super::kernel::{Kernel, KernelState};
use super::memory::{Piece, Pool};
use crate::device::adversary::Dice;
use crate::device::region::Regions;
use crate::device::{Fragment, PlaceFault, Queue};

/// Most fragments that one job takes: enough to make the lock cheap, few enough to share a submit between threads.
const JOB_FRAGMENTS: usize = 64;
/// A job stops taking fragments at this size, for the same reason.
const JOB_BYTES: usize = 1 << 20;

/// Work to run without the lock.
pub(super) struct Job {
    pub(super) queue: Queue,
    pub(super) work: Work,
    /// Kept between jobs.
    pub(super) pieces: Vec<Piece>,
}

pub(super) enum Work {
    Pieces,
    Table { slot: u32, from: u32, to: u32 },
    Kernel(Box<dyn Kernel>, KernelState),
}

impl Job {
    pub(super) fn new() -> Self {
        Self {
            queue: Queue::CopyIn,
            work: Work::Pieces,
            pieces: Vec::with_capacity(JOB_FRAGMENTS),
        }
    }
}

/// Takes the next pieces of the first `left` fragments. Returns how many fragments were taken to their end.
pub(super) fn take_pieces(
    fragments: &mut VecDeque<Piece>,
    left: usize,
    dice: &mut Dice,
    pieces: &mut Vec<Piece>,
) -> usize {
    if dice.tears() {
        fragments.swap(0, dice.fragment(left)); // unordered inside one submit
        let Some(first) = fragments.front_mut() else { return 0 };
        let (bytes, from_end) = dice.piece(first.bytes);
        pieces.push(first.cut(bytes, from_end));
        let ended = first.bytes == 0;
        if ended {
            fragments.pop_front();
        }
        return usize::from(ended);
    }
    let most = if dice.single_steps() {
        1
    } else {
        left.min(JOB_FRAGMENTS)
    };
    let mut bytes = 0;
    while pieces.len() < most && bytes < JOB_BYTES {
        let Some(piece) = fragments.pop_front() else { break };
        bytes += piece.bytes;
        pieces.push(piece);
    }
    pieces.len()
}

/// Checks a fragment and turns it into addresses, with the bit of the region it holds.
pub(super) fn resolve(regions: &Regions, pool: &Pool, fragment: &Fragment) -> Result<(Piece, u64), PlaceFault> {
    match *fragment {
        Fragment::Upload {
            region,
            host,
            device,
            bytes,
        } => {
            let to = pool.resolve(device, bytes)?;
            let (from, bit) = regions.resolve(region, host, bytes, false)?;
            Ok((
                Piece {
                    from,
                    to,
                    bytes: bytes as usize,
                },
                bit,
            ))
        }
        Fragment::WriteBack {
            region,
            host,
            device,
            bytes,
        } => {
            let from = pool.resolve(device, bytes)?;
            let (to, bit) = regions.resolve(region, host, bytes, true)?;
            Ok((
                Piece {
                    from,
                    to,
                    bytes: bytes as usize,
                },
                bit,
            ))
        }
        Fragment::Move { from, to, bytes } => {
            let (source, target) = (pool.resolve(from, bytes)?, pool.resolve(to, bytes)?);
            if from.abs_diff(to) < bytes {
                return Err(PlaceFault::Overlap { from, to, bytes });
            }
            Ok((
                Piece {
                    from: source,
                    to: target,
                    bytes: bytes as usize,
                },
                0,
            ))
        }
    }
}
