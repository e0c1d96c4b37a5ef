//! `kvsluice eval plan`.

use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock};
use serde_json::{Map, Value, json};

use super::fields::{BadInput, Fields};
use super::names::{Names, saturated};
use super::refusal;
use crate::diff_plan::{BlockDiffPlan, PlanKind};
use crate::planner::{LayerInput, PlanError, PlanInput, Planner, TableMode};

/// What a hole is in `held`.
const HOLE: i64 = -1;

struct Layer {
    layer: i64,
    group: i64,
    active: bool,
    want: Vec<i64>,
    held: Vec<i64>,
    held_valid: u64,
    tail: Vec<i64>,
}

impl Layer {
    fn read(fields: &Fields<'_>) -> Result<Self, BadInput> {
        Ok(Self {
            layer: fields.count("layer")?.cast_signed(),
            group: fields.count("group")?.cast_signed(),
            active: fields.flag("active")?,
            want: fields.integers("want")?,
            held: fields.integers("held")?,
            held_valid: fields.count("held_valid")?,
            tail: fields.integers("tail")?,
        })
    }
}

/// The lists of one layer under the core's names.
struct Renamed {
    want: Vec<LogicalBlock>,
    held: Vec<Option<LogicalBlock>>,
    tail: Vec<LogicalBlock>,
}

struct AllNames {
    layers: Names,
    groups: Names,
    blocks: Names,
}

pub(super) fn answer(planner: &mut Planner, fields: &Fields<'_>) -> Result<Value, BadInput> {
    let seq_blocks = fields.count("seq_blocks")?.cast_signed();
    let table_mode = match fields.text("table_mode")?.as_str() {
        "common" => TableMode::Common,
        "per_layer" => TableMode::PerLayer,
        other => {
            return Err(BadInput(format!(
                "`table_mode`: {other:?} is neither \"common\" nor \"per_layer\""
            )));
        }
    };
    let layers = fields
        .objects("layers")?
        .iter()
        .map(Layer::read)
        .collect::<Result<Vec<_>, _>>()?;

    let ids = layers
        .iter()
        .flat_map(|layer| [&layer.want, &layer.held, &layer.tail].into_iter().flatten());
    let names = AllNames {
        layers: Names::for_all(layers.iter().map(|layer| layer.layer)),
        groups: Names::for_all(layers.iter().map(|layer| layer.group)),
        blocks: Names::below(seq_blocks, ids.copied()),
    };
    let block = |&id: &i64| LogicalBlock(names.blocks.name(id));
    let renamed: Vec<Renamed> = layers
        .iter()
        .map(|layer| Renamed {
            want: layer.want.iter().map(block).collect(),
            held: layer.held.iter().map(|id| (*id != HOLE).then(|| block(id))).collect(),
            tail: layer.tail.iter().map(block).collect(),
        })
        .collect();
    let inputs: Vec<LayerInput<'_>> = layers
        .iter()
        .zip(&renamed)
        .map(|(layer, lists)| LayerInput {
            layer: DecoderLayer(names.layers.name(layer.layer)),
            group: GroupId(names.groups.name(layer.group)),
            active: layer.active,
            want: &lists.want,
            held: &lists.held,
            held_valid: BlockCount(saturated(layer.held_valid)),
            tail: &lists.tail,
        })
        .collect();
    let seq_blocks = BlockCount(names.blocks.bound());
    Ok(
        match planner.plan(&PlanInput {
            seq_blocks,
            table_mode,
            layers: &inputs,
        }) {
            Ok(plan) => written(plan, &names),
            Err(error) => refusal(word(&error), &error),
        },
    )
}

fn written(plan: &BlockDiffPlan, names: &AllNames) -> Value {
    let numbers = |ids: &[LogicalBlock]| ids.iter().map(|id| names.blocks.number(id.get())).collect::<Vec<_>>();
    let layers: Vec<Value> = plan
        .layers()
        .map(|layer| {
            json!({
                "layer": names.layers.number(layer.layer.get()),
                "group": names.groups.number(layer.group.get()),
                "upload": numbers(layer.upload),
                "new": layer.new_blocks(),
                "pad": numbers(layer.pad),
                "truncated": layer.truncated,
            })
        })
        .collect();
    let mut answer = json!({
        "kind": match plan.kind() {
            PlanKind::Zero => "zero",
            PlanKind::Delta => "delta",
            PlanKind::Full => "full",
        },
        "layers": layers,
        "max_id": plan.max_id().map_or(0, |id| names.blocks.number(id.get())),
    });
    if let (Some(slots), Some(answer)) = (plan.common_new_slots(), answer.as_object_mut()) {
        let slots: Map<String, Value> = slots
            .iter()
            .map(|(group, new)| (names.groups.number(group.get()).to_string(), json!(new)))
            .collect();
        answer.insert("common_new_slots".to_owned(), Value::Object(slots));
    }
    answer
}

fn word(error: &PlanError) -> &'static str {
    match error {
        PlanError::DuplicateLayer { .. } => "duplicate_layer",
        PlanError::HeldValid { .. } => "held_valid",
        PlanError::OutOfRange { .. } => "out_of_range",
        PlanError::DuplicateWant { .. } => "duplicate_want",
        PlanError::DuplicateHeld { .. } => "duplicate_held",
    }
}
