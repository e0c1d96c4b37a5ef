//! What every accepted plan must satisfy, whoever wrote its bytes (X9, X33).

use kvsluice_layout::plan::Plan;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{Kind, NEW_SLOT, RetainMode};

/// Panics where an accepted plan names a block outside its pool, a null block, or one destination twice in a row.
pub(super) fn assert_sound(map: &GeometryMap, plan: &Plan<'_>) {
    for row in plan.rows() {
        let group = &map.geometry().groups[row.group as usize];
        let host = |id: u32| id < group.source_blocks && group.source_null.is_none_or(|null| null.0 != id);
        let device = |id: u32| id < group.device_blocks && group.device_null.is_none_or(|null| null.0 != id);
        let pairs = plan.pairs(row);
        assert!(row.valid <= row.pairs && pairs.len() == row.valid as usize, "{row:?}");
        for pair in pairs {
            let sound = match (plan.kind(), plan.mode()) {
                (Kind::Upload, _) => host(pair.source) && device(pair.destination),
                (Kind::WriteBack, _) => device(pair.source) && host(pair.destination),
                (Kind::Retain, Some(RetainMode::ByteMove)) => device(pair.source) && device(pair.destination),
                (Kind::Retain, _) => {
                    (pair.source == NEW_SLOT || pair.source < group.device_blocks) && device(pair.destination)
                }
                _ => false,
            };
            assert!(sound, "{:?} {row:?} {pair:?}", plan.kind());
        }
        let mut seen = 0_u64;
        for pair in pairs {
            // Pools of this geometry have fewer blocks than a word has bits.
            let bit = 1 << (pair.destination % 64);
            assert!(seen & bit == 0, "{row:?} writes block {} twice", pair.destination);
            seen |= bit;
        }
    }
}
