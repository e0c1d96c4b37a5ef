//! The layers that a workload plans for: those with memory of their own, and what each wants resident.
#![forbid(unsafe_code)]

use kvsluice_layout::geometry::{Attention, Geometry, GroupSpec};
use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, Rank};
use kvsluice_layout::planes::GeometryMap;

use super::options::{OptionsError, Sources, WorkloadOptions};

/// What a layer wants resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Need {
    /// The best blocks of the sequence.
    Selected {
        /// How many.
        budget: BlockCount,
    },
    /// The last tokens of the sequence.
    Window {
        /// How many.
        tokens: u32,
    },
}

/// A layer with a tensor of its own.
#[derive(Clone, Debug)]
pub(super) struct LayerPlan {
    pub(super) layer: DecoderLayer,
    pub(super) group: GroupId,
    pub(super) need: Need,
    pub(super) block_tokens: u32,
    /// Bytes of one block of the layer, summed over the ranks.
    pub(super) bytes: u64,
    /// Layers that use the same tensor and therefore the same blocks.
    pub(super) aliases: Vec<DecoderLayer>,
}

/// Blocks of a group's device pools that can be handed out.
pub(super) fn capacity(group: &GroupSpec) -> u32 {
    group.device_blocks - u32::from(group.device_null.is_some_and(|null| null.get() < group.device_blocks))
}

/// Most blocks that one layer of the group wants at a time, in a sequence of `blocks` blocks.
pub(super) fn most_wanted(need: Need, block_tokens: u32, blocks: u32) -> u32 {
    match need {
        Need::Selected { budget } => budget.get().min(blocks),
        // The window begins and ends within a block.
        Need::Window { tokens } => (tokens.div_ceil(block_tokens) + 1).min(blocks),
    }
}

/// The layers of a geometry as the options want them played.
///
/// # Errors
/// [`OptionsError`] where a group's pools are too small for one request.
pub(super) fn plan_layers(map: &GeometryMap, options: &WorkloadOptions) -> Result<Vec<LayerPlan>, OptionsError> {
    let geometry = map.geometry();
    let mut plans = Vec::new();
    for (number, layer) in (0..)
        .zip(&geometry.layers)
        .filter(|(_, layer)| layer.alias_of.is_none())
    {
        let (layer, group) = (DecoderLayer(number), layer.group);
        let Some(spec) = geometry.group(group) else { continue };
        plans.push(LayerPlan {
            layer,
            group,
            need: need(spec, group, options)?,
            block_tokens: spec.block_tokens,
            bytes: (0..geometry.ranks)
                .map(|rank| map.shard_block_bytes(Rank(rank), layer))
                .sum(),
            aliases: aliases(geometry, layer),
        });
    }
    Ok(plans)
}

/// What a layer of the group wants of every request. An error where the pools are too small for it.
pub(super) fn need(spec: &GroupSpec, group: GroupId, options: &WorkloadOptions) -> Result<Need, OptionsError> {
    let found = capacity(spec);
    let gather = if options.sources == Sources::Copy {
        spec.gather_blocks
    } else {
        u32::MAX
    };
    let (need, needed) = match spec.attention {
        Attention::SlidingWindow { window_tokens: tokens } => {
            let need = Need::Window { tokens };
            (need, most_wanted(need, spec.block_tokens, u32::MAX))
        }
        Attention::Full => {
            // R36: sink and recent are wanted whatever the budget is.
            let always = options.sink.get().saturating_add(options.recent.get()).max(1);
            let budget = BlockCount(options.budget.get().min(found).min(gather).max(always));
            (Need::Selected { budget }, always)
        }
    };
    if needed > found {
        return Err(OptionsError::DeviceBlocks { group, needed, found });
    }
    if needed > gather {
        return Err(OptionsError::GatherBlocks {
            group,
            needed,
            found: gather,
        });
    }
    Ok(need)
}

/// Layers whose tensor is `layer`'s, through other aliases as well.
fn aliases(geometry: &Geometry, layer: DecoderLayer) -> Vec<DecoderLayer> {
    let mut aliases = Vec::new();
    for (number, spec) in (0..).zip(&geometry.layers) {
        if spec.alias_of.is_some_and(|of| of == layer || aliases.contains(&of)) {
            aliases.push(DecoderLayer(number));
        }
    }
    aliases
}
