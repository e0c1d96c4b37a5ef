//! The order of moves inside the device pool: a retention by byte move, made safe (R53, R57).
//!
//! The moves of a Retain happen "at once": every destination gets what its source held before. A device runs the copies
//! of one submit in any order, so [`MoveOrder`] cuts the moves into batches: inside one batch nothing that is written
//! is read, and batches run one after the other. A cycle, such as two blocks that change places, needs a scratch block.
//! Any order of slots can be reached, and the cost is linear in the number of moves.

use kvsluice_layout::planted::planted;
use kvsluice_layout::record::Pair;
use thiserror::Error;

/// No move.
const NONE: u32 = u32::MAX;
/// A move of a block onto itself: it is not done, and holds its block.
const STAYS: u32 = u32::MAX - 1;

/// Why moves have no order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MoveError {
    /// A block outside the group's device pool. The plan's fault; the lease check refuses it before (X9).
    #[error("move {index} names block {block} of {blocks}")]
    Block {
        /// Index of the move.
        index: usize,
        /// The block.
        block: u32,
        /// Blocks of the pool.
        blocks: usize,
    },
    /// Two moves write one block.
    #[error("move {index} writes block {block}, which another move writes too")]
    Duplicate {
        /// Index of the second of them.
        index: usize,
        /// The block.
        block: u32,
    },
    /// A scratch block that a move names, or that is outside the pool.
    #[error("scratch block {block} is named by a move, or outside the pool")]
    Scratch {
        /// The block.
        block: u32,
    },
    /// A cycle and no scratch block.
    #[error("block {block} is on a cycle of moves and there is no scratch block; give at least one")]
    Cycle {
        /// A block of the cycle.
        block: u32,
    },
}

/// What is known of one physical block while moves are ordered.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Moves still to come that read it.
    reads: u32,
    /// The move that writes it, or [`NONE`], or [`STAYS`].
    writer: u32,
}

const UNNAMED: Block = Block { reads: 0, writer: NONE };

/// Orders moves of one group. Keeps its memory between calls.
#[derive(Debug)]
pub struct MoveOrder {
    blocks: Vec<Block>,
    /// The moves to do; the source of one turns into a scratch block where it closes a cycle.
    moves: Vec<Pair>,
    /// Moves that nothing holds back, of this batch and of the next.
    ready: Vec<u32>,
    next: Vec<u32>,
    /// Whether each move is in a batch.
    emitted: Vec<bool>,
    ordered: Vec<Pair>,
    batch_ends: Vec<usize>,
}

impl MoveOrder {
    /// For a group of `blocks` device blocks.
    pub fn new(blocks: u32) -> Self {
        Self {
            blocks: vec![UNNAMED; blocks as usize],
            moves: Vec::new(),
            ready: Vec::new(),
            next: Vec::new(),
            emitted: Vec::new(),
            ordered: Vec::new(),
            batch_ends: Vec::new(),
        }
    }

    /// Orders `moves`, (block read, block written). Moves of a block onto itself are left out. Each cycle needs one of
    /// the `scratch` blocks while it runs; more of them let more cycles run side by side.
    pub fn order(&mut self, moves: &[Pair], scratch: &[u32]) -> Result<(), MoveError> {
        self.ordered.clear();
        self.batch_ends.clear();
        self.moves.clear();
        let result = self.enter(moves, scratch).and_then(|()| self.run(scratch));
        for pair in moves {
            for block in [pair.source, pair.destination] {
                if let Some(block) = self.blocks.get_mut(block as usize) {
                    *block = UNNAMED;
                }
            }
        }
        if result.is_err() {
            self.ordered.clear();
            self.batch_ends.clear();
        }
        result
    }

    /// The batches, in the order in which they run; the moves of one batch may run in any order.
    pub fn batches(&self) -> impl Iterator<Item = &[Pair]> {
        let starts = [0].into_iter().chain(self.batch_ends.iter().copied());
        starts
            .zip(&self.batch_ends)
            .map(|(start, &end)| self.ordered.get(start..end).unwrap_or(&[]))
    }

    fn enter(&mut self, moves: &[Pair], scratch: &[u32]) -> Result<(), MoveError> {
        let blocks = self.blocks.len();
        for (index, pair) in moves.iter().enumerate() {
            let outside = |block| MoveError::Block { index, block, blocks };
            let source = self.blocks.get_mut(pair.source as usize).ok_or(outside(pair.source))?;
            source.reads += 1;
            let target = self
                .blocks
                .get_mut(pair.destination as usize)
                .ok_or(outside(pair.destination))?;
            if target.writer != NONE {
                return Err(MoveError::Duplicate {
                    index,
                    block: pair.destination,
                });
            }
            if pair.source == pair.destination {
                target.writer = STAYS;
                target.reads -= 1;
                continue;
            }
            target.writer = self.moves.len() as u32;
            self.moves.push(*pair);
        }
        for &block in scratch {
            match self.blocks.get(block as usize) {
                Some(Block { reads: 0, writer: NONE }) => {}
                _ => return Err(MoveError::Scratch { block }),
            }
        }
        Ok(())
    }

    fn run(&mut self, scratch: &[u32]) -> Result<(), MoveError> {
        self.emitted.clear();
        self.emitted.resize(self.moves.len(), false);
        self.ready.clear();
        for (index, pair) in (0u32..).zip(&self.moves) {
            if self.reads(pair.destination) == 0 {
                self.ready.push(index);
            }
        }
        self.drain();
        // What is left are disjoint cycles: every destination is the source of exactly one other move.
        let mut free = scratch.len();
        for index in 0..self.moves.len() as u32 {
            if self.is_emitted(index) {
                continue;
            }
            if free == 0 {
                self.end_batch();
                self.drain();
                free = scratch.len();
                if self.is_emitted(index) {
                    continue;
                }
            }
            let block = self.moves.get(index as usize).map_or(NONE, |pair| pair.destination);
            let Some(&kept) = free.checked_sub(1).and_then(|at| scratch.get(at)) else {
                return Err(MoveError::Cycle { block });
            };
            free -= 1;
            self.break_cycle(index, block, kept);
        }
        self.end_batch();
        self.drain();
        Ok(())
    }

    /// Saves `block`, which move `index` overwrites, to `scratch`, so that its reader reads there.
    fn break_cycle(&mut self, index: u32, block: u32, scratch: u32) {
        self.ordered.push(Pair {
            source: block,
            destination: scratch,
        });
        let mut at = index;
        // Walk from writer to writer; the last one reads `block`. The whole cycle counts as emitted from here on.
        while let Some(pair) = self.moves.get_mut(at as usize) {
            if let Some(emitted) = self.emitted.get_mut(at as usize) {
                *emitted = true;
            }
            if pair.source == block {
                pair.source = scratch;
                break;
            }
            at = self.blocks.get(pair.source as usize).map_or(NONE, |block| block.writer);
        }
        if let Some(block) = self.blocks.get_mut(block as usize) {
            block.reads -= 1;
        }
        self.ready.push(index);
    }

    /// Emits batch after batch until nothing is ready.
    fn drain(&mut self) {
        while !self.ready.is_empty() {
            self.next.clear();
            for at in 0..self.ready.len() {
                let Some((index, pair)) = self
                    .ready
                    .get(at)
                    .and_then(|&index| Some((index, *self.moves.get(index as usize)?)))
                else {
                    continue;
                };
                self.ordered.push(pair);
                if let Some(emitted) = self.emitted.get_mut(index as usize) {
                    *emitted = true;
                }
                // A scratch block has no reads counted, and nobody waits for it.
                let Some(source) = self
                    .blocks
                    .get_mut(pair.source as usize)
                    .filter(|source| source.reads > 0)
                else {
                    continue;
                };
                source.reads -= 1;
                if source.reads == 0 && source.writer < STAYS {
                    self.next.push(source.writer);
                }
            }
            if !planted("moves_in_one_batch") {
                self.end_batch();
            }
            std::mem::swap(&mut self.ready, &mut self.next);
        }
    }

    fn end_batch(&mut self) {
        if self.batch_ends.last().copied().unwrap_or(0) < self.ordered.len() {
            self.batch_ends.push(self.ordered.len());
        }
    }

    fn reads(&self, block: u32) -> u32 {
        self.blocks.get(block as usize).map_or(0, |block| block.reads)
    }

    fn is_emitted(&self, index: u32) -> bool {
        self.emitted.get(index as usize).copied().unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    fn pairs(moves: &[(u32, u32)]) -> Vec<Pair> {
        moves
            .iter()
            .map(|&(source, destination)| Pair { source, destination })
            .collect()
    }

    /// Runs the batches on a pool whose block b holds b; inside a batch all reads come last-to-first after all writes
    /// of the moves before them, which is the worst order a device may choose.
    fn executed(order: &MoveOrder, blocks: u32, rng: &mut fastrand::Rng) -> Vec<u32> {
        let mut pool: Vec<_> = (0..blocks).collect();
        for batch in order.batches() {
            let mut batch = batch.to_vec();
            rng.shuffle(&mut batch);
            for pair in batch {
                pool[pair.destination as usize] = pool[pair.source as usize];
            }
        }
        pool
    }

    fn right(moves: &[Pair], scratch: &[u32], blocks: u32, pool: &[u32]) -> bool {
        let mut expected: Vec<_> = (0..blocks).collect();
        for pair in moves {
            expected[pair.destination as usize] = pair.source;
        }
        (0..blocks)
            .filter(|block| !scratch.contains(block))
            .all(|block| expected[block as usize] == pool[block as usize])
    }

    #[test]
    fn r53_any_set_of_moves_ends_as_if_all_happened_at_once() {
        const BLOCKS: u32 = 24;
        let run = |seed: u64| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let scratch: Vec<_> = (BLOCKS - rng.u32(1..4)..BLOCKS).collect();
            let named = BLOCKS - 3;
            let mut targets: Vec<_> = (0..named).collect();
            rng.shuffle(&mut targets);
            let permutation = rng.bool();
            let mut sources = targets.clone();
            rng.shuffle(&mut sources);
            let count = rng.usize(0..=named as usize);
            let source = |n: usize, rng: &mut fastrand::Rng| if permutation { sources[n] } else { rng.u32(0..named) };
            let moves: Vec<_> = targets[..count]
                .iter()
                .enumerate()
                .map(|(n, &destination)| Pair {
                    source: source(n, &mut rng),
                    destination,
                })
                .collect();
            let mut order = MoveOrder::new(BLOCKS);
            order.order(&moves, &scratch).unwrap();
            let hazard = order.batches().any(|batch| {
                batch.iter().any(|a| {
                    batch
                        .iter()
                        .any(|b| a.destination == b.source || (a != b && a.destination == b.destination))
                })
            });
            assert!(
                order
                    .blocks
                    .iter()
                    .all(|block| block.reads == 0 && block.writer == NONE),
                "seed {seed}: not clean"
            );
            !hazard && right(&moves, &scratch, BLOCKS, &executed(&order, BLOCKS, &mut rng))
        };
        for seed in 0..2000 {
            assert!(run(seed), "seed {seed}");
        }
        assert!(with_planted("moves_in_one_batch", || (0..2000).any(|seed| !run(seed))));
    }

    #[test]
    fn r53_a_swap_goes_through_scratch_and_a_shift_does_not() {
        let mut order = MoveOrder::new(8);
        order.order(&pairs(&[(0, 1), (1, 0)]), &[7]).unwrap();
        let batches: Vec<_> = order.batches().map(<[Pair]>::to_vec).collect();
        assert_eq!(batches, [pairs(&[(1, 7)]), pairs(&[(0, 1)]), pairs(&[(7, 0)])]);
        order.order(&pairs(&[(2, 1), (3, 2), (4, 3)]), &[]).unwrap();
        assert_eq!(order.batches().map(<[Pair]>::len).collect::<Vec<_>>(), [1, 1, 1]);
        order.order(&pairs(&[(4, 0), (5, 1), (3, 2), (3, 3)]), &[]).unwrap();
        assert_eq!(order.batches().map(<[Pair]>::len).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn r53_moves_without_an_order_are_refused_and_leave_nothing_behind() {
        let mut order = MoveOrder::new(4);
        let cases = [
            (
                pairs(&[(0, 4)]),
                vec![],
                MoveError::Block {
                    index: 0,
                    block: 4,
                    blocks: 4,
                },
            ),
            (
                pairs(&[(0, 2), (1, 2)]),
                vec![],
                MoveError::Duplicate { index: 1, block: 2 },
            ),
            (pairs(&[(0, 1)]), vec![1], MoveError::Scratch { block: 1 }),
            (pairs(&[(0, 1), (1, 0)]), vec![], MoveError::Cycle { block: 1 }),
        ];
        for (moves, scratch, expected) in cases {
            assert_eq!(order.order(&moves, &scratch), Err(expected));
            assert_eq!(order.batches().count(), 0);
            order.order(&pairs(&[(0, 1), (1, 0)]), &[3]).unwrap();
            assert_eq!(order.batches().count(), 3);
        }
    }
}
