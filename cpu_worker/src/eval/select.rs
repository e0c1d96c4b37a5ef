//! `kvsluice eval select`.

use kvsluice_layout::ids::{BlockCount, TokenCount};
use serde_json::{Value, json};

use super::fields::{BadInput, Fields};
use super::names::saturated;
use super::refusal;
use crate::selector::{SelectError, SelectInput, Selector};

pub(super) fn answer(selector: &mut Selector, fields: &Fields<'_>) -> Result<Value, BadInput> {
    let scores = fields.scores("scores")?;
    let input = SelectInput {
        scores: &scores,
        block_size: TokenCount(saturated(fields.count("block_size")?)),
        seq_len: TokenCount(saturated(fields.count("seq_len")?)),
        budget: BlockCount(saturated(fields.count("budget")?)),
        sink: BlockCount(saturated(fields.count("sink")?)),
        recent: BlockCount(saturated(fields.count("recent")?)),
    };
    Ok(match selector.select(&input) {
        Ok(out) => json!({
            "selected": out.selected,
            "ranked_tail": out.ranked_tail,
            "effective_budget": out.effective_budget,
        }),
        Err(error) => refusal(word(&error), &error),
    })
}

fn word(error: &SelectError) -> &'static str {
    match error {
        SelectError::ZeroBlockSize => "zero_block_size",
        SelectError::ShortScores { .. } => "short_scores",
        SelectError::NonFiniteScore { .. } | SelectError::NonFiniteSum { .. } => "non_finite",
    }
}
