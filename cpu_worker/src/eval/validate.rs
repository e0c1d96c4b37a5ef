//! `kvsluice eval validate`.

use serde_json::{Value, json};

use super::fields::{BadInput, Fields};
use super::refusal;
use crate::whole_blocks::{WholeBlockError, validate_whole_blocks};

pub(super) fn answer(fields: &Fields<'_>) -> Result<Value, BadInput> {
    let ids = fields.integers("ids")?;
    let block_size = fields.count("block_size")?;
    Ok(match validate_whole_blocks(&ids, block_size) {
        Ok(blocks) => json!({ "blocks": blocks }),
        Err(error) => refusal(word(&error), &error),
    })
}

fn word(error: &WholeBlockError) -> &'static str {
    match error {
        WholeBlockError::ZeroBlockSize => "zero_block_size",
        WholeBlockError::Ragged { .. } => "ragged",
        WholeBlockError::Negative { .. } => "negative",
        WholeBlockError::Unaligned { .. } => "unaligned",
        WholeBlockError::NotWhole { .. } => "not_whole",
        WholeBlockError::Duplicate { .. } => "duplicate",
    }
}
