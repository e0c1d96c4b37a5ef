//! What every accepted plan must satisfy, whoever wrote its bytes (X9, X33).

use kvsluice_layout::plan::Plan;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::preset;
use kvsluice_layout::record::{Kind, NEW_SLOT, RetainMode};

/// The geometry that both targets check against: every feature at once, tiny.
pub fn geometry() -> GeometryMap {
    let geometry = preset("sample-hybrid").expect("a preset");
    GeometryMap::new(&geometry).expect("a valid geometry")
}

/// Panics where an accepted plan names a block outside its pool, a null block, or one destination twice in a row.
pub fn assert_sound(map: &GeometryMap, plan: &Plan<'_>) {
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
        let mut destinations: Vec<_> = pairs.iter().map(|pair| pair.destination).collect();
        destinations.sort_unstable();
        assert!(destinations.windows(2).all(|two| two[0] != two[1]), "{row:?}: {destinations:?}");
    }
}

/// The bytes as words, the last one filled up with zeros.
pub fn words(data: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    data.chunks(8).map(word).collect()
}
