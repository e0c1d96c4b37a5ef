//! How long decisions take (P9), measured on the production functions with made-up sequences.

use std::hint::black_box;
use std::time::Instant;

use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock, TokenCount};

use crate::planner::{LayerInput, PlanInput, Planner, TableMode};
use crate::selector::{SelectInput, Selector};

/// Layers of the P9 case.
pub const LAYERS: u32 = 64;
/// Blocks per layer of the P9 case; an eighth of them is wanted.
pub const BLOCKS: u32 = 4_096;
/// P9: a plan takes no longer than this.
pub const TARGET_US: f64 = 250.0;

/// What [`bench_planner`] measured, on one core. Times are of one call for all [`LAYERS`] layers.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannerBench {
    /// P9, nothing held: every wanted block is uploaded. Median, µs.
    pub cold_p50_us: f64,
    /// P9, seven eighths of the wanted blocks held, as in a running request. Median, µs.
    pub warm_p50_us: f64,
    /// P9, half of the layers need pads. Median, µs.
    pub padded_p50_us: f64,
    /// One layer's selection, per block of 16 tokens. Median, ns.
    pub select_ns_per_block: f64,
    /// (blocks per layer, median µs of a warm plan): the cost against scale.
    pub scale: Vec<(u32, f64)>,
}

/// The lists of one layer: an eighth wanted, the rest in the tail, both in rank order as a selection gives them.
struct Lists {
    want: Vec<LogicalBlock>,
    held: Vec<Option<LogicalBlock>>,
    tail: Vec<LogicalBlock>,
}

/// Which part of the wanted blocks is held.
#[derive(Clone, Copy)]
enum Held {
    Nothing,
    Most,
    /// Nothing in even layers, the first wanted block in odd ones: these need a pad.
    Uneven,
}

fn lists(blocks: u32, held: Held, rng: &mut fastrand::Rng) -> Vec<Lists> {
    (0..LAYERS)
        .map(|layer| {
            let mut ids: Vec<LogicalBlock> = (0..blocks).map(LogicalBlock).collect();
            rng.shuffle(&mut ids);
            let tail = ids.split_off(blocks as usize / 8);
            let resident = match held {
                Held::Nothing => 0,
                Held::Most => ids.len() * 7 / 8,
                Held::Uneven => layer as usize % 2,
            };
            // As many slots as blocks are wanted; those that keep no wanted block keep one that is wanted no more.
            let kept = ids.iter().take(resident).chain(tail.iter().rev());
            let slots = if resident == 0 { 0 } else { ids.len() };
            let held = kept.take(slots).map(|block| Some(*block)).collect();
            Lists { want: ids, held, tail }
        })
        .collect()
}

/// Median time of one plan, µs.
fn plan_p50_us(planner: &mut Planner, blocks: u32, held: Held, rounds: usize) -> f64 {
    let lists = lists(blocks, held, &mut fastrand::Rng::with_seed(9));
    let layers: Vec<LayerInput<'_>> = (0..)
        .zip(&lists)
        .map(|(layer, lists)| LayerInput {
            layer: DecoderLayer(layer),
            group: GroupId(0),
            active: true,
            want: &lists.want,
            held: &lists.held,
            held_valid: BlockCount(u32::try_from(lists.held.len()).unwrap_or(u32::MAX)),
            tail: &lists.tail,
        })
        .collect();
    let input = PlanInput {
        seq_blocks: BlockCount(blocks),
        table_mode: TableMode::Common,
        layers: &layers,
    };
    p50_ns(rounds, || {
        black_box(planner.plan(black_box(&input)).is_ok());
    }) / 1_000.0
}

fn p50_ns(rounds: usize, mut body: impl FnMut()) -> f64 {
    let mut times: Vec<u128> = (0..rounds + rounds / 10)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_nanos()
        })
        .skip(rounds / 10) // the first rounds grow the scratch
        .collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default() as f64
}

/// Measures the planner and the selector. Takes about a second.
pub fn bench_planner() -> PlannerBench {
    const ROUNDS: usize = 500;
    let mut planner = Planner::new();
    let mut rng = fastrand::Rng::with_seed(1);
    let scores: Vec<f64> = (0..BLOCKS * 16).map(|_| rng.f64()).collect();
    let select = SelectInput {
        scores: &scores,
        block_size: TokenCount(16),
        seq_len: TokenCount(BLOCKS * 16),
        budget: BlockCount(BLOCKS / 8),
        sink: BlockCount(4),
        recent: BlockCount(4),
    };
    let mut selector = Selector::new();
    let select_ns = p50_ns(ROUNDS, || {
        black_box(selector.select(black_box(&select)).is_ok());
    });
    PlannerBench {
        cold_p50_us: plan_p50_us(&mut planner, BLOCKS, Held::Nothing, ROUNDS),
        warm_p50_us: plan_p50_us(&mut planner, BLOCKS, Held::Most, ROUNDS),
        padded_p50_us: plan_p50_us(&mut planner, BLOCKS, Held::Uneven, ROUNDS),
        select_ns_per_block: select_ns / f64::from(BLOCKS),
        scale: [4_096, 16_384, 65_536]
            .map(|blocks| {
                (
                    blocks,
                    plan_p50_us(&mut planner, blocks, Held::Most, ROUNDS * 4_096 / blocks as usize),
                )
            })
            .to_vec(),
    }
}
