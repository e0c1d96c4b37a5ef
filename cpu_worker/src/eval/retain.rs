//! `kvsluice eval retain`.

use kvsluice_layout::ids::{BlockCount, DecoderLayer, PhysicalBlock, PoolGeneration, RequestEpoch, ResidentSlot};
use serde_json::{Map, Value, json};

use super::fields::{BadInput, Fields};
use super::names::{Names, saturated};
use super::refusal;
use crate::retain::{RetainError, RetainInput, RetainKind, RetainLayer, RetainPlan, RetainPlanner};

struct Layer {
    layer: i64,
    active: bool,
    physical_by_slot: Vec<i64>,
    valid: u64,
    keep: Vec<ResidentSlot>,
}

impl Layer {
    fn read(fields: &Fields<'_>) -> Result<Self, BadInput> {
        Ok(Self {
            layer: fields.count("layer")?.cast_signed(),
            active: fields.flag("active")?,
            physical_by_slot: fields.counts("physical_by_slot")?,
            valid: fields.count("valid")?,
            // A slot that is negative or does not fit is out of range in every layer, as the largest one is.
            keep: fields
                .integers("keep")?
                .into_iter()
                .map(|slot| ResidentSlot(u32::try_from(slot).unwrap_or(u32::MAX)))
                .collect(),
        })
    }
}

pub(super) fn answer(planner: &mut RetainPlanner, fields: &Fields<'_>) -> Result<Value, BadInput> {
    let expect = fields.object("expect")?;
    let layers = fields
        .objects("layers")?
        .iter()
        .map(Layer::read)
        .collect::<Result<Vec<_>, _>>()?;
    let layer_names = Names::for_all(layers.iter().map(|layer| layer.layer));
    let block_names = Names::for_all(layers.iter().flat_map(|layer| &layer.physical_by_slot).copied());
    let physical: Vec<Vec<PhysicalBlock>> = layers
        .iter()
        .map(|layer| {
            layer
                .physical_by_slot
                .iter()
                .map(|id| PhysicalBlock(block_names.name(*id)))
                .collect()
        })
        .collect();
    let inputs: Vec<RetainLayer<'_>> = layers
        .iter()
        .zip(&physical)
        .map(|(layer, physical_by_slot)| RetainLayer {
            layer: DecoderLayer(layer_names.name(layer.layer)),
            active: layer.active,
            physical_by_slot,
            valid: BlockCount(saturated(layer.valid)),
            keep: &layer.keep,
        })
        .collect();
    let input = RetainInput {
        request_epoch: RequestEpoch(fields.count("request_epoch")?),
        pool_generation: PoolGeneration(fields.count("pool_generation")?),
        expected_request_epoch: RequestEpoch(expect.count("request_epoch")?),
        expected_pool_generation: PoolGeneration(expect.count("pool_generation")?),
        supports_layer_tables: fields.flag("supports_layer_tables")?,
        layers: &inputs,
        protected: &[],
    };
    Ok(match planner.plan_retain_group(&input) {
        Ok(plan) => written(plan, &layer_names, &block_names),
        Err(error) => refusal(word(&error), &error),
    })
}

fn written(plan: &RetainPlan, layer_names: &Names, block_names: &Names) -> Value {
    let numbers = |ids: &[PhysicalBlock]| ids.iter().map(|id| block_names.number(id.get())).collect::<Vec<_>>();
    let by_layer = |row: fn(&[ResidentSlot]) -> Value| {
        plan.layers()
            .map(move |(layer, slots, table)| (layer, row(slots), numbers(table)))
    };
    let key = |layer: DecoderLayer| layer_names.number(layer.get()).to_string();
    let released = numbers(plan.released());
    match plan.kind() {
        RetainKind::SharedTableRemap => {
            let table = numbers(plan.shared_table().unwrap_or_default());
            json!({ "kind": "shared", "kept": table.len(), "table": table, "released": released })
        }
        RetainKind::LayerTableRemap => {
            let tables: Map<String, Value> = by_layer(|_| Value::Null)
                .map(|(layer, _, table)| (key(layer), json!(table)))
                .collect();
            json!({ "kind": "per_layer", "tables": tables, "released": released })
        }
        RetainKind::ExistingByteMovePlan => {
            let rows: Map<String, Value> = by_layer(|slots| json!(slots))
                .map(|(layer, slots, _)| (key(layer), slots))
                .collect();
            json!({ "kind": "byte_move", "rows": rows, "released": released })
        }
    }
}

fn word(error: &RetainError) -> &'static str {
    match error {
        RetainError::DuplicateLayer { .. } => "duplicate_layer",
        RetainError::StaleEpoch { .. } => "stale_epoch",
        RetainError::StaleGeneration { .. } => "stale_generation",
        RetainError::Valid { .. } => "valid",
        RetainError::SlotOutOfRange { .. } => "slot_out_of_range",
        RetainError::DuplicateSlot { .. } => "duplicate_slot",
    }
}
