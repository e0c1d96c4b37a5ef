//! Each field altered alone, missing alone, and the rules for source kinds.

use super::*;
use crate::geometry::{LayerSpec, Sharding};
use crate::ids::{DecoderLayer, PhysicalBlock, SourceBlock};
use crate::presets::preset;

const BOTH: SourceKinds = SourceKinds {
    source_only: true,
    copy: true,
};
const IN_PLACE: SourceKinds = SourceKinds {
    source_only: true,
    copy: false,
};
const COPY: SourceKinds = SourceKinds {
    source_only: false,
    copy: true,
};
const NEITHER: SourceKinds = SourceKinds {
    source_only: false,
    copy: false,
};

fn capability() -> Capability {
    let mut geometry = preset("sample-hybrid").unwrap();
    geometry.groups.iter_mut().for_each(|group| group.gather_blocks = 2);
    Capability::of(&geometry, SelectionUnit::Block, BOTH, ProcessEpoch(7))
}

/// The refusal of `theirs` by an unaltered peer; both sides must name the same field and each other's values.
fn refusal(theirs: &Capability) -> Option<CapabilityError> {
    let ours = capability();
    let (here, there) = (negotiate(&ours, theirs).err(), negotiate(theirs, &ours).err());
    let mirrored = there.map(|error| CapabilityError {
        ours: error.theirs,
        theirs: error.ours,
        ..error
    });
    assert_eq!(
        here, mirrored,
        "X20: an error on both sides that names the field and both values"
    );
    here
}

type Change = fn(&mut Capability);

/// One change per field that is compared.
const ALTERED: [(&str, Change); 11] = [
    ("protocol", |c| {
        c.protocol = Some(ProtocolVersion {
            major: PROTOCOL.major + 1,
            minor: 0,
        })
    }),
    ("process_epoch", |c| c.process_epoch = Some(ProcessEpoch(0))),
    ("selection_unit", |c| c.selection_unit = Some(SelectionUnit::Token)),
    ("row_contract", |c| c.row_contract = Some(false)),
    ("dtype", |c| c.dtype = Some(Dtype::Bf16)),
    ("block_tokens", |c| c.block_tokens.as_mut().unwrap()[1] *= 2),
    ("gather_blocks", |c| c.gather_blocks.as_mut().unwrap()[1] += 1),
    ("source_kinds", |c| c.source_kinds = Some(IN_PLACE)),
    ("keep_map_version", |c| c.keep_map_version = Some(KEEP_MAP_VERSION + 1)),
    ("per_layer_tables", |c| c.per_layer_tables = Some(false)),
    ("geometry_hash", |c| c.geometry_hash.as_mut().unwrap().0 ^= 1),
];

const MISSING: [(&str, Change); 11] = [
    ("protocol", |c| c.protocol = None),
    ("process_epoch", |c| c.process_epoch = None),
    ("selection_unit", |c| c.selection_unit = None),
    ("row_contract", |c| c.row_contract = None),
    ("dtype", |c| c.dtype = None),
    ("block_tokens", |c| c.block_tokens = None),
    ("gather_blocks", |c| c.gather_blocks = None),
    ("source_kinds", |c| c.source_kinds = None),
    ("keep_map_version", |c| c.keep_map_version = None),
    ("per_layer_tables", |c| c.per_layer_tables = None),
    ("geometry_hash", |c| c.geometry_hash = None),
];

/// The changes that are not refused with the name of their field.
fn unnoticed(changes: &[(&'static str, Change)]) -> Vec<&'static str> {
    let noticed = |(field, change): &(&'static str, Change)| {
        let mut theirs = capability();
        change(&mut theirs);
        refusal(&theirs).is_some_and(|error| error.field == *field && error.ours != error.theirs)
    };
    changes
        .iter()
        .filter(|change| !noticed(change))
        .map(|(field, _)| *field)
        .collect()
}

#[test]
fn r19_both_sides_start_with_one_compaction_method_or_not_at_all() {
    let of = |unit| Capability {
        selection_unit: Some(unit),
        ..capability()
    };
    let agreed = |ours, theirs| negotiate(&of(ours), &of(theirs)).map(|agreed| agreed.selection_unit);
    let (block, token) = (SelectionUnit::Block, SelectionUnit::Token);
    assert_eq!((agreed(block, block), agreed(token, token)), (Ok(block), Ok(token)));
    let refused = || [agreed(block, token), agreed(token, block)].map(|outcome| outcome.err().map(|error| error.field));
    assert_eq!(refused(), [Some("selection_unit"); 2]);
    #[cfg(feature = "planted")]
    assert_ne!(
        crate::planted::with_planted("r19_each_side_its_method", refused),
        refused(),
        "the planted fault is not seen"
    );
}

#[test]
fn r20_each_field_altered_alone_is_refused_by_its_name_on_both_sides() {
    assert_eq!(unnoticed(&ALTERED), Vec::<&str>::new());
}

#[test]
fn r20_each_field_missing_alone_is_refused_by_its_name_on_both_sides() {
    assert_eq!(unnoticed(&MISSING), Vec::<&str>::new());
}

#[test]
fn r20_the_altered_fields_are_all_fields_of_the_wire_form() {
    // TOML has no integers above i64::MAX, so the hash is a small one here.
    let theirs = Capability {
        allow_copy_fallback: Some(true),
        geometry_hash: Some(GeometryHash(7)),
        ..capability()
    };
    let text = toml::to_string(&theirs).unwrap();
    let wire: toml::Table = toml::from_str(&text).unwrap();
    let mut fields: Vec<&str> = wire.keys().map(String::as_str).collect();
    let mut altered: Vec<&str> = ALTERED
        .iter()
        .map(|(field, _)| *field)
        .chain(["allow_copy_fallback"])
        .collect();
    fields.sort_unstable();
    altered.sort_unstable();
    assert_eq!(fields, altered);
    let again: Capability = toml::from_str(&format!("from_a_later_minor = 1\n{text}")).unwrap();
    assert_eq!(again, theirs, "X4: what a later minor adds is ignored");
}

#[test]
fn r20_equal_capabilities_agree() {
    let theirs = Capability {
        process_epoch: Some(ProcessEpoch(9)),
        ..capability()
    };
    let agreed = negotiate(&capability(), &theirs).unwrap();
    let expected = Agreed {
        minor: PROTOCOL.minor,
        peer_epoch: ProcessEpoch(9),
        selection_unit: SelectionUnit::Block,
        source_kinds: BOTH,
        copy_fallback: false,
        per_layer_tables: true,
        keep_map_version: KEEP_MAP_VERSION,
    };
    assert_eq!(agreed, expected);
}

#[test]
fn x4_another_minor_version_agrees_on_the_smaller() {
    let newer = ProtocolVersion {
        minor: PROTOCOL.minor + 3,
        ..PROTOCOL
    };
    let theirs = Capability {
        protocol: Some(newer),
        ..capability()
    };
    assert_eq!(negotiate(&capability(), &theirs).unwrap().minor, PROTOCOL.minor);
    assert_eq!(negotiate(&theirs, &capability()).unwrap().minor, PROTOCOL.minor);
}

#[test]
fn r27_a_back_end_without_rows_is_refused_even_where_both_lack_them() {
    let lacking = Capability {
        row_contract: Some(false),
        ..capability()
    };
    assert_eq!(negotiate(&lacking, &lacking).unwrap_err().field, "row_contract");
}

#[test]
fn r19_r20_a_refusal_reads_as_one_sentence() {
    let theirs = Capability {
        dtype: Some(Dtype::Fp8),
        ..capability()
    };
    assert_eq!(
        refusal(&theirs).unwrap().to_string(),
        "capability field dtype: ours is F16, theirs is Fp8; configure one KV type on both sides"
    );
}

/// A pair with these kinds, gather region and wish for the fallback.
struct Sources {
    unit: SelectionUnit,
    kinds: [SourceKinds; 2],
    gather_blocks: Vec<u32>,
    asked: [Option<bool>; 2],
}

/// A device side that cannot read in place, everything there for a fallback, nobody asking for it.
fn no_source_only() -> Sources {
    Sources {
        unit: SelectionUnit::Block,
        kinds: [BOTH, COPY],
        gather_blocks: vec![2, 2],
        asked: [None; 2],
    }
}

impl Sources {
    fn negotiate(&self) -> Result<(SourceKinds, bool), &'static str> {
        let side = |at: usize| Capability {
            selection_unit: Some(self.unit),
            source_kinds: Some(self.kinds[at]),
            gather_blocks: Some(self.gather_blocks.clone()),
            allow_copy_fallback: self.asked[at],
            ..capability()
        };
        let agreed = negotiate(&side(0), &side(1)).map_err(|error| error.field)?;
        Ok((agreed.source_kinds, agreed.copy_fallback))
    }
}

const ASKED: [Option<bool>; 2] = [Some(true); 2];

#[test]
fn r21_an_empty_gather_region_without_source_only_fails_the_start_even_where_a_fallback_is_asked_for() {
    for gather_blocks in [vec![], vec![0, 0], vec![2, 0]] {
        for unit in [SelectionUnit::Block, SelectionUnit::Token] {
            for kinds in [[BOTH, COPY], [COPY, COPY]] {
                let sources = Sources {
                    unit,
                    kinds,
                    gather_blocks: gather_blocks.clone(),
                    asked: ASKED,
                };
                assert_eq!(sources.negotiate(), Err("source_kinds"), "{gather_blocks:?}");
            }
        }
    }
}

#[test]
fn r3_k_equal_n_is_fine_with_source_only_and_leaves_no_copies() {
    let sources = Sources {
        kinds: [BOTH; 2],
        gather_blocks: vec![0, 0],
        ..no_source_only()
    };
    assert_eq!(sources.negotiate(), Ok((IN_PLACE, false)));
    #[cfg(feature = "planted")]
    assert_eq!(
        crate::planted::with_planted("r3_copies_without_a_gather_region", || sources.negotiate()),
        Ok((BOTH, false)),
        "the planted fault is not seen"
    );
}

#[test]
fn r22_a_fallback_needs_to_be_asked_for_and_a_verified_copy_path_and_the_pool() {
    assert_eq!(no_source_only().negotiate(), Err("source_kinds"), "not asked for");
    assert_eq!(
        Sources {
            kinds: [COPY; 2],
            ..no_source_only()
        }
        .negotiate(),
        Err("source_kinds"),
        "not asked for"
    );
    assert_eq!(
        Sources {
            asked: [Some(false); 2],
            ..no_source_only()
        }
        .negotiate(),
        Err("source_kinds")
    );
    assert_eq!(
        Sources {
            asked: [Some(true), None],
            ..no_source_only()
        }
        .negotiate(),
        Err("allow_copy_fallback")
    );
    assert_eq!(
        Sources {
            asked: ASKED,
            ..no_source_only()
        }
        .negotiate(),
        Ok((COPY, true))
    );
    for kinds in [[BOTH, NEITHER], [IN_PLACE, COPY], [NEITHER; 2]] {
        let unverified = Sources {
            kinds,
            asked: ASKED,
            ..no_source_only()
        };
        assert_eq!(unverified.negotiate(), Err("source_kinds"), "no verified copy path");
    }
    let poolless = Sources {
        gather_blocks: vec![0, 2],
        asked: ASKED,
        ..no_source_only()
    };
    assert_eq!(poolless.negotiate(), Err("source_kinds"), "no pool");
}

#[test]
fn r22_copying_is_no_fallback_for_a_token_selection() {
    let sources = Sources {
        unit: SelectionUnit::Token,
        kinds: [COPY; 2],
        ..no_source_only()
    };
    assert_eq!(sources.negotiate(), Ok((COPY, false)));
}

#[test]
fn r22_a_fallback_that_nothing_needs_changes_nothing() {
    let sources = Sources {
        kinds: [BOTH; 2],
        asked: ASKED,
        ..no_source_only()
    };
    assert_eq!(sources.negotiate(), Ok((BOTH, false)));
}

/// The changes of a geometry that leave its hash as it is.
fn unhashed() -> Vec<usize> {
    let changes: [fn(&mut Geometry); 16] = [
        |g| g.model.push('x'),
        |g| g.dtype = Dtype::Bf16,
        |g| g.ranks = 2,
        |g| g.groups[1].block_tokens = 16,
        |g| g.groups[1].attention = Attention::Full,
        |g| g.groups[1].attention = Attention::SlidingWindow { window_tokens: 33 },
        |g| g.groups[0].source_blocks += 1,
        |g| g.groups[0].gather_blocks += 1,
        |g| g.groups[0].device_blocks += 1,
        |g| g.groups[0].source_null = Some(SourceBlock(1)),
        |g| g.groups[0].device_null = None,
        |g| g.groups[2].device_null = Some(PhysicalBlock(0)),
        |g| g.groups[0].host_order = PoolOrder::BlockFirst,
        |g| {
            g.layers[4].kv = KvKind::Fused {
                kv_heads: 8,
                head_dim: 4,
            }
        },
        |g| g.layers[0].sharding = Sharding::Replicated,
        |g| g.layers[6].alias_of = Some(DecoderLayer(4)),
    ];
    let geometry = preset("sample-hybrid").unwrap();
    let same = |change: &fn(&mut Geometry)| {
        let mut changed = geometry.clone();
        change(&mut changed);
        geometry_hash(&changed) == geometry_hash(&geometry)
    };
    (0..changes.len()).filter(|&at| same(&changes[at])).collect()
}

#[test]
fn r20_the_geometry_hash_covers_every_field() {
    assert_eq!(unhashed(), Vec::<usize>::new());
}

#[test]
fn r20_a_latent_layer_hashes_alike_under_either_sharding() {
    let geometry = preset("deepseek-v3").unwrap();
    let mut other = geometry.clone();
    let replicated = |layer: &mut LayerSpec| layer.sharding = Sharding::Replicated;
    other.layers.iter_mut().for_each(replicated);
    assert_eq!(geometry_hash(&geometry), geometry_hash(&other));
}

#[test]
fn r20_the_geometry_hash_of_the_sample_is_fixed() {
    // A change here is a change of the protocol: raise its major version.
    assert_eq!(
        format!("{:?}", geometry_hash(&preset("sample").unwrap())),
        "24a816d6a152d5f4"
    );
}

#[cfg(feature = "planted")]
#[test]
fn r19_r27_the_checks_go_red_for_each_planted_fault() {
    use crate::planted::with_planted;
    // The equality of `refusal` holds under these faults too: both sides run the same code.
    assert_eq!(with_planted("r20_ignore_dtype", || unnoticed(&ALTERED)), ["dtype"]);
    assert_eq!(
        with_planted("r27_ignore_rows", || unnoticed(&ALTERED)),
        ["row_contract"]
    );
    assert_eq!(with_planted("r20_hash_ignores_dtype", unhashed), [1]);
    let poolless = Sources {
        gather_blocks: vec![0, 2],
        asked: ASKED,
        ..no_source_only()
    };
    assert_eq!(
        with_planted("r21_ignore_gather", || poolless.negotiate()),
        Ok((COPY, true))
    );
    let unverified = Sources {
        kinds: [BOTH, NEITHER],
        asked: ASKED,
        ..no_source_only()
    };
    assert_eq!(
        with_planted("r22_unverified_copy", || unverified.negotiate()),
        Ok((COPY, true))
    );
    assert_eq!(
        with_planted("r22_unasked_fallback", || no_source_only().negotiate()),
        Ok((COPY, true))
    );
}
