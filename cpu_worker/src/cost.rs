//! What moving and keeping blocks costs, each term apart (R1, R2, R62–R65).
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{BlockCount, TokenCount};
use kvsluice_layout::planted::planted;

use crate::retain::{RetainKind, RetainPlan};

/// The six costs of bringing and keeping blocks, in bytes. None is inferred from another: a source-only run has no CPU
/// gather and may still move every byte on the GPU (R1, R2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovementCounters {
    /// Gathered by the CPU into a compaction destination. 0 for source-only transfers.
    pub cpu_gather_bytes: u64,
    /// Allocated by the CPU as compaction destination. 0 for source-only transfers.
    pub cpu_destination_bytes: u64,
    /// Copied from host to device.
    pub h2d_bytes: u64,
    /// Unpacked or scattered on the device after the copy.
    pub gpu_scatter_bytes: u64,
    /// Moved on the device to compact what is resident.
    pub gpu_compaction_bytes: u64,
    /// Plans, tables and acknowledgements.
    pub metadata_bytes: u64,
}

impl MovementCounters {
    /// Adds another run's counters, each to its own; a counter at its end stays there.
    pub fn add(&mut self, other: &Self) {
        let add = |to: &mut u64, more: u64| *to = to.saturating_add(more);
        add(&mut self.cpu_gather_bytes, other.cpu_gather_bytes);
        add(&mut self.cpu_destination_bytes, other.cpu_destination_bytes);
        // R2: none is inferred from another.
        let h2d_bytes = if planted("r2_h2d_is_what_was_gathered") {
            other.cpu_gather_bytes
        } else {
            other.h2d_bytes
        };
        add(&mut self.h2d_bytes, h2d_bytes);
        add(&mut self.gpu_scatter_bytes, other.gpu_scatter_bytes);
        add(&mut self.gpu_compaction_bytes, other.gpu_compaction_bytes);
        add(&mut self.metadata_bytes, other.metadata_bytes);
    }
}

/// Size of one layer's selection, in blocks of `block_size` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectionSize {
    /// Elements of the ledger's lists: one per block, so about 1/B of a token ledger's.
    pub ledger_elements: u64,
    /// Bytes to upload: those of its tokens, whatever the block size. Larger blocks are no speed-up by themselves (R62).
    pub h2d_bytes: u64,
}

/// Size of `blocks` blocks of `block_size` tokens of `token_bytes` bytes each.
pub fn selection_size(blocks: BlockCount, block_size: TokenCount, token_bytes: u32) -> SelectionSize {
    let tokens = u64::from(blocks.get()) * u64::from(block_size.get());
    SelectionSize {
        ledger_elements: blocks.get().into(),
        h2d_bytes: if planted("r62_larger_blocks_are_faster") {
            u64::from(blocks.get()) * u64::from(token_bytes)
        } else {
            tokens.saturating_mul(token_bytes.into())
        },
    }
}

/// The terms of Tretain in µs, as measured; `None` where a term was not (R63, R65).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RetainTerms {
    /// Writing tables and valid lengths.
    pub table_update_us: Option<f64>,
    /// Making the plan.
    pub plan_us: Option<f64>,
    /// Sending and acknowledging it.
    pub metadata_us: Option<f64>,
    /// Waiting for readers and transfers.
    pub wait_us: Option<f64>,
    /// The owner's work.
    pub allocator_us: Option<f64>,
    /// Moving KV bytes. Not looked at for a remap, where none move.
    pub kv_move_us: Option<f64>,
}

/// The terms of the benefit: h × (attention before − after) + avoided stall − accepted-output penalty (R64).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BenefitTerms {
    /// h: how many attention calls will profit.
    pub horizon_calls: Option<f64>,
    /// One attention call with what is resident now, µs.
    pub attention_before_us: Option<f64>,
    /// One attention call with what is kept, µs.
    pub attention_after_us: Option<f64>,
    /// Capacity stalls that the released blocks avoid, µs.
    pub avoided_stall_us: Option<f64>,
    /// What worse accepted output costs, µs.
    pub output_penalty_us: Option<f64>,
}

/// Whether to retain now.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Benefit > Tretain + margin.
    Retain {
        /// By how much, µs.
        gain_us: f64,
    },
    /// Not worth it now.
    Wait {
        /// By how much it falls short, µs; 0 if it just breaks even.
        shortfall_us: f64,
    },
    /// No decision: these terms were not measured, or are no numbers (R65).
    Unmeasured(Vec<&'static str>),
}

/// Decides whether to carry out `plan` now: Benefit > Tretain + `margin_us`, strictly (R63, R64).
pub fn decide(plan: &RetainPlan, cost: &RetainTerms, benefit: &BenefitTerms, margin_us: f64) -> Decision {
    let mut unmeasured = Vec::new();
    let mut term = |name, value: Option<f64>| match value {
        Some(value) if value.is_finite() => value,
        // R65: never silently zero. The sum below is not used once a name is listed.
        _ => {
            if !planted("r65_unmeasured_is_zero") {
                unmeasured.push(name);
            }
            0.0
        }
    };
    // R63: Tkv_move is 0 only on a remap, and a remap plan comes from the validation alone.
    let kv_move_us = match plan.kind() {
        RetainKind::SharedTableRemap | RetainKind::LayerTableRemap => 0.0,
        RetainKind::ExistingByteMovePlan if planted("r63_moves_are_free") => 0.0,
        RetainKind::ExistingByteMovePlan => term("kv_move_us", cost.kv_move_us),
    };
    let retain_us = term("table_update_us", cost.table_update_us)
        + term("plan_us", cost.plan_us)
        + term("metadata_us", cost.metadata_us)
        + term("wait_us", cost.wait_us)
        + term("allocator_us", cost.allocator_us)
        + kv_move_us;
    let saved_us = term("attention_before_us", benefit.attention_before_us)
        - term("attention_after_us", benefit.attention_after_us);
    let benefit_us = term("horizon_calls", benefit.horizon_calls) * saved_us
        + term("avoided_stall_us", benefit.avoided_stall_us)
        - term("output_penalty_us", benefit.output_penalty_us);
    let gain_us = benefit_us - (retain_us + term("margin_us", Some(margin_us)));
    if !unmeasured.is_empty() {
        return Decision::Unmeasured(unmeasured);
    }
    if gain_us > 0.0 || (gain_us == 0.0 && planted("r64_break_even_retains")) {
        Decision::Retain { gain_us }
    } else {
        Decision::Wait { shortfall_us: -gain_us }
    }
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::ids::{DecoderLayer, PhysicalBlock, PoolGeneration, RequestEpoch, ResidentSlot};
    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::retain::{RetainInput, RetainLayer, RetainPlanner};

    fn plan(supports_layer_tables: bool, second_keep: u32) -> RetainPlan {
        let table = [PhysicalBlock(4), PhysicalBlock(9)];
        let keeps = [[ResidentSlot(0)], [ResidentSlot(second_keep)]];
        let row = |layer, keep| RetainLayer {
            layer: DecoderLayer(layer),
            active: true,
            physical_by_slot: &table,
            valid: BlockCount(2),
            keep,
        };
        let layers = [row(0, &keeps[0]), row(1, &keeps[1])];
        let input = RetainInput {
            request_epoch: RequestEpoch(1),
            pool_generation: PoolGeneration(1),
            expected_request_epoch: RequestEpoch(1),
            expected_pool_generation: PoolGeneration(1),
            supports_layer_tables,
            layers: &layers,
            protected: &[],
        };
        RetainPlanner::new().plan_retain_group(&input).unwrap().clone()
    }

    const COST: RetainTerms = RetainTerms {
        table_update_us: Some(1.0),
        plan_us: Some(2.0),
        metadata_us: Some(3.0),
        wait_us: Some(4.0),
        allocator_us: Some(5.0),
        kv_move_us: None,
    };
    const BENEFIT: BenefitTerms = BenefitTerms {
        horizon_calls: Some(10.0),
        attention_before_us: Some(5.0),
        attention_after_us: Some(3.0),
        avoided_stall_us: Some(2.0),
        output_penalty_us: Some(1.0),
    };

    #[test]
    fn r64_a_retention_is_worth_it_only_above_cost_and_margin() {
        // 10 × (5 − 3) + 2 − 1 = 21 against 15.
        assert_eq!(
            decide(&plan(true, 0), &COST, &BENEFIT, 5.0),
            Decision::Retain { gain_us: 1.0 }
        );
        let even = || decide(&plan(true, 0), &COST, &BENEFIT, 6.0);
        assert_eq!(even(), Decision::Wait { shortfall_us: 0.0 });
        assert_ne!(
            with_planted("r64_break_even_retains", even),
            even(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r63_moving_bytes_costs_nothing_on_a_validated_remap_only() {
        let shared = plan(true, 0);
        let layers = plan(true, 1);
        let moved = plan(false, 1);
        for remap in [&shared, &layers] {
            assert_eq!(decide(remap, &COST, &BENEFIT, 0.0), Decision::Retain { gain_us: 6.0 });
        }
        let unmeasured = || decide(&moved, &COST, &BENEFIT, 0.0);
        assert_eq!(unmeasured(), Decision::Unmeasured(vec!["kv_move_us"]));
        assert_ne!(
            with_planted("r63_moves_are_free", unmeasured),
            unmeasured(),
            "the planted fault is not seen"
        );
        let measured = RetainTerms {
            kv_move_us: Some(7.0),
            ..COST
        };
        assert_eq!(
            decide(&moved, &measured, &BENEFIT, 0.0),
            Decision::Wait { shortfall_us: 1.0 }
        );
    }

    #[test]
    fn r65_an_unmeasured_term_is_named_and_gives_no_decision() {
        let cost = RetainTerms {
            wait_us: None,
            plan_us: Some(f64::NAN),
            ..COST
        };
        let benefit = BenefitTerms {
            horizon_calls: None,
            ..BENEFIT
        };
        let decision = || decide(&plan(true, 0), &cost, &benefit, 0.0);
        assert_eq!(
            decision(),
            Decision::Unmeasured(vec!["plan_us", "wait_us", "horizon_calls"])
        );
        assert_ne!(
            with_planted("r65_unmeasured_is_zero", decision),
            decision(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r2_each_of_the_six_counters_counts_its_own_and_moves_no_other() {
        let counters: [fn(&mut MovementCounters) -> &mut u64; 6] = [
            |of| &mut of.cpu_gather_bytes,
            |of| &mut of.cpu_destination_bytes,
            |of| &mut of.h2d_bytes,
            |of| &mut of.gpu_scatter_bytes,
            |of| &mut of.gpu_compaction_bytes,
            |of| &mut of.metadata_bytes,
        ];
        let apart = || {
            counters.iter().all(|counter| {
                let only = |bytes| {
                    let mut run = MovementCounters::default();
                    *counter(&mut run) = bytes;
                    run
                };
                let mut total = only(60);
                total.add(&only(40));
                total == only(100)
            })
        };
        assert!(apart());
        assert!(
            !with_planted("r2_h2d_is_what_was_gathered", apart),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r62_larger_blocks_mean_fewer_elements_and_the_same_bytes() {
        let sizes = || {
            let tokens = selection_size(BlockCount(4_096), TokenCount(1), 512);
            let blocks = selection_size(BlockCount(128), TokenCount(32), 512);
            (
                tokens.ledger_elements / blocks.ledger_elements,
                [tokens.h2d_bytes, blocks.h2d_bytes],
            )
        };
        assert_eq!(sizes(), (32, [4_096 * 512; 2]));
        assert_ne!(
            with_planted("r62_larger_blocks_are_faster", sizes),
            sizes(),
            "the planted fault is not seen"
        );
    }
}
