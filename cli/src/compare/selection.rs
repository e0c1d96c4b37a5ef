//! The fixed selection: what every way is given (R11).

use anyhow::{Context, Result};
use kvsluice_cpu_worker::selection::{BlockSelection, LayerSelection};
use kvsluice_cpu_worker::selector::{SelectInput, Selector};
use kvsluice_layout::content;
use kvsluice_layout::geometry::{Attention, GroupSpec};
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, LogicalBlock, RequestEpoch, SelectionRevision, TokenCount,
};
use kvsluice_layout::planes::GeometryMap;
use serde::Serialize;

/// Which layers of a group select alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Agreement {
    /// All of them: their ordered keep lists are equal, and one table serves them (R7).
    PerGroup,
    /// None of them: one table would be wrong for all but one (R6).
    PerLayer,
}

/// What is selected from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) seed: u64,
    pub(super) rounds: u32,
    /// Whole blocks of the sequence.
    pub(super) blocks: BlockCount,
    /// Blocks that a full-attention layer wants.
    pub(super) budget: BlockCount,
    pub(super) agreement: Agreement,
}

/// One selection per round, by seed. The block size that a selection states is that of group 0; every layer's blocks
/// are of its own group's size.
pub(super) fn selections(map: &GeometryMap, wish: &Wish) -> Result<Vec<BlockSelection>> {
    let mut selector = Selector::new();
    let of_round = |round| selection(map, wish, round, &mut selector);
    (0..wish.rounds).map(of_round).collect()
}

fn selection(map: &GeometryMap, wish: &Wish, round: u32, selector: &mut Selector) -> Result<BlockSelection> {
    let geometry = map.geometry();
    let mut layers: Vec<LayerSelection> = Vec::new();
    for (number, spec) in (0..).zip(&geometry.layers).filter(|(_, spec)| spec.alias_of.is_none()) {
        let group = geometry.group(spec.group).context("a layer without a group")?;
        let (layer, alike) = (DecoderLayer(number), wish.agreement == Agreement::PerGroup);
        let other = layers.iter().find(|other| alike && other.group == spec.group);
        let (logical_blocks, ranked_tail) = match (other, group.attention) {
            (Some(other), _) => (other.logical_blocks.clone(), other.ranked_tail.clone()),
            (None, Attention::SlidingWindow { window_tokens }) => (window(group, wish, window_tokens), Vec::new()),
            (None, Attention::Full) => ranked(group, wish, (layer, round), selector)?,
        };
        layers.push(LayerSelection {
            layer,
            group: spec.group,
            logical_blocks,
            ranked_tail,
        });
    }
    let block_size = geometry.group(GroupId(0)).map_or(0, |group| group.block_tokens);
    let revision = SelectionRevision(u64::from(round) + 1);
    let made = BlockSelection::new(RequestEpoch(1), revision, TokenCount(block_size), wish.blocks, layers);
    Ok(made?)
}

/// The last blocks of the sequence, as far as the window reaches (R61).
fn window(group: &GroupSpec, wish: &Wish, tokens: u32) -> Vec<LogicalBlock> {
    let most = tokens.div_ceil(group.block_tokens) + 1;
    let first = wish.blocks.get().saturating_sub(most);
    (first..wish.blocks.get()).map(LogicalBlock).collect()
}

/// The best blocks by scores that move a little from round to round, and the others behind them.
fn ranked(
    group: &GroupSpec,
    wish: &Wish,
    (layer, round): (DecoderLayer, u32),
    selector: &mut Selector,
) -> Result<(Vec<LogicalBlock>, Vec<LogicalBlock>)> {
    let mut scores = Vec::new();
    for block in 0..wish.blocks.get() {
        let base = unit(content::seed(wish.seed, layer.get(), block, 0));
        let drift = unit(content::seed(wish.seed, layer.get(), block, round + 1));
        scores.extend((0..group.block_tokens).map(|_| base + drift));
    }
    let selected = selector.select(&SelectInput {
        scores: &scores,
        block_size: TokenCount(group.block_tokens),
        seq_len: TokenCount(wish.blocks.get() * group.block_tokens),
        budget: wish.budget,
        sink: BlockCount(1),
        recent: BlockCount(1),
    })?;
    Ok((selected.selected.to_vec(), selected.ranked_tail.to_vec()))
}

/// A number in [0, 1) from 64 random bits.
pub(super) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}
