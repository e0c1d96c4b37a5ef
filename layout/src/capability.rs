//! What two processes must agree on before the first byte: exchanged and compared once, at attach (R19–R22, R27, X20).
//!
//! Both sides run [`negotiate`] on the same pair, each with its own side first, so a mismatch is an error on both that
//! names one field and both values. Every field is optional on the wire, so that a missing one is refused by its name
//! rather than by the parser; fields that a later minor version adds are ignored.

use core::fmt::{self, Debug};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::geometry::{Attention, Dtype, Geometry, KvKind, PoolOrder};
use crate::ids::ProcessEpoch;
use crate::planted::planted;

/// Version of the handshake and of the records that this build speaks.
pub const PROTOCOL: ProtocolVersion = ProtocolVersion { major: 1, minor: 0 };
/// Version of the keep map that this build speaks.
pub const KEEP_MAP_VERSION: u32 = 1;

/// A protocol version: minor versions only add, another major is another protocol (X4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolVersion {
    /// Must be equal.
    pub major: u16,
    /// May differ; both then speak the smaller.
    pub minor: u16,
}

/// What a selection consists of; the compaction method. Resolved once, at start (R19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SelectionUnit {
    /// Single tokens, packed into new blocks.
    Token,
    /// Whole blocks.
    Block,
}

/// Where an upload can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceKinds {
    /// Ids name pool blocks in place.
    pub source_only: bool,
    /// The producer gathers into the gather region first. True only where this side has verified that path (R22).
    pub copy: bool,
}

/// Hash over a geometry: model, dtype, ranks, groups and layers. Not the layout hash of the segments (X3).
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GeometryHash(pub u64);

impl Debug for GeometryHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One side's part of the start-up agreement (R20).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capability {
    /// Protocol version.
    pub protocol: Option<ProtocolVersion>,
    /// Epoch of this process; not compared, but never 0 (X22).
    pub process_epoch: Option<ProcessEpoch>,
    /// Selection unit.
    pub selection_unit: Option<SelectionUnit>,
    /// Whether the back end implements rows per layer (R4, R24). A back end that does not is refused (R27).
    pub row_contract: Option<bool>,
    /// Type of the KV elements.
    pub dtype: Option<Dtype>,
    /// Block size in tokens of each group.
    pub block_tokens: Option<Vec<u32>>,
    /// Size in blocks of each group's gather region.
    pub gather_blocks: Option<Vec<u32>>,
    /// Source kinds.
    pub source_kinds: Option<SourceKinds>,
    /// Version of the keep map.
    pub keep_map_version: Option<u32>,
    /// Whether each layer can have a block table of its own (R8, R53).
    pub per_layer_tables: Option<bool>,
    /// Hash of the whole geometry.
    pub geometry_hash: Option<GeometryHash>,
    /// Whether block selections may go by the copy path where source-only is missing (R22). Missing means no.
    pub allow_copy_fallback: Option<bool>,
}

impl Capability {
    /// The capability of a process of this build with `geometry`: rows per layer and per-layer tables supported, no
    /// fallback.
    pub fn of(geometry: &Geometry, unit: SelectionUnit, kinds: SourceKinds, epoch: ProcessEpoch) -> Self {
        Self {
            protocol: Some(PROTOCOL),
            process_epoch: Some(epoch),
            selection_unit: Some(unit),
            row_contract: Some(true),
            dtype: Some(geometry.dtype),
            block_tokens: Some(geometry.groups.iter().map(|group| group.block_tokens).collect()),
            gather_blocks: Some(geometry.groups.iter().map(|group| group.gather_blocks).collect()),
            source_kinds: Some(kinds),
            keep_map_version: Some(KEEP_MAP_VERSION),
            per_layer_tables: Some(true),
            geometry_hash: Some(geometry_hash(geometry)),
            allow_copy_fallback: None,
        }
    }
}

/// What holds for the life of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The smaller of the two minor versions.
    pub minor: u16,
    /// The peer's process epoch.
    pub peer_epoch: ProcessEpoch,
    /// The one selection unit of this attachment.
    pub selection_unit: SelectionUnit,
    /// Source kinds that a plan may use; `copy` only where every group has a gather region.
    pub source_kinds: SourceKinds,
    /// True where block selections go by copy because source-only is missing and both sides allowed that.
    pub copy_fallback: bool,
    /// Whether each layer can have a block table of its own.
    pub per_layer_tables: bool,
    /// Version of the keep map.
    pub keep_map_version: u32,
}

/// Why two processes do not fit: the first field that does not. Whoever started them causes it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("capability field {field}: ours is {ours}, theirs is {theirs}; {remedy}")]
pub struct CapabilityError {
    /// Name of the field.
    pub field: &'static str,
    /// This side's value, or `missing`.
    pub ours: String,
    /// The peer's value, or `missing`.
    pub theirs: String,
    /// What to change.
    pub remedy: &'static str,
}

/// Compares two capabilities (X20).
///
/// # Errors
/// [`CapabilityError`] for the first field that is missing, differs, or breaks its rule.
pub fn negotiate(ours: &Capability, theirs: &Capability) -> Result<Agreed, CapabilityError> {
    let protocol = Field::of("protocol", &ours.protocol, &theirs.protocol)?;
    // X4: a minor version only adds.
    protocol.require(
        protocol.ours.major == protocol.theirs.major,
        "run builds of one major version",
    )?;

    let epoch = Field::of("process_epoch", &ours.process_epoch, &theirs.process_epoch)?;
    let started = [epoch.ours, epoch.theirs].iter().all(|epoch| epoch.get() != 0);
    epoch.require(started, "draw a random non-zero epoch at each process start")?; // X22

    // R19
    let unit = Field::of("selection_unit", &ours.selection_unit, &theirs.selection_unit)?;
    let selection_unit = match planted("r19_each_side_its_method") {
        true => *unit.ours,
        false => *unit.equal("configure one compaction method on both sides")?, // R19
    };

    // R27
    let rows = Field::of("row_contract", &ours.row_contract, &theirs.row_contract)?;
    let both = (*rows.ours && *rows.theirs) || planted("r27_ignore_rows");
    rows.require(both, "use a back end that accepts one row per layer")?;

    // R20
    let dtype = Field::of("dtype", &ours.dtype, &theirs.dtype)?;
    if !planted("r20_ignore_dtype") {
        dtype.equal("configure one KV type on both sides")?;
    }
    Field::of("block_tokens", &ours.block_tokens, &theirs.block_tokens)?.equal(SAME_GEOMETRY)?;
    let gather = Field::of("gather_blocks", &ours.gather_blocks, &theirs.gather_blocks)?.equal(SAME_GEOMETRY)?;
    let keep_map = Field::of("keep_map_version", &ours.keep_map_version, &theirs.keep_map_version)?;
    let tables = Field::of("per_layer_tables", &ours.per_layer_tables, &theirs.per_layer_tables)?;
    let keep_map_version = *keep_map.equal("run builds with one keep-map version")?;
    let per_layer_tables = *tables.equal("configure the producer for what the engine's attention supports")?;
    Field::of("geometry_hash", &ours.geometry_hash, &theirs.geometry_hash)?.equal(SAME_GEOMETRY)?;

    let (source_kinds, copy_fallback) = agree_sources(ours, theirs, selection_unit, gather)?;
    Ok(Agreed {
        minor: protocol.ours.minor.min(protocol.theirs.minor),
        peer_epoch: *epoch.theirs,
        selection_unit,
        source_kinds,
        copy_fallback,
        per_layer_tables,
        keep_map_version,
    })
}

const SAME_GEOMETRY: &str = "give both sides the same preset or geometry file, and the same sizes";

/// The source kinds of the attachment, and whether copying is the fallback for block selections.
fn agree_sources(
    ours: &Capability,
    theirs: &Capability,
    unit: SelectionUnit,
    gather_blocks: &[u32],
) -> Result<(SourceKinds, bool), CapabilityError> {
    let kinds = Field::of("source_kinds", &ours.source_kinds, &theirs.source_kinds)?;
    let in_place = kinds.ours.source_only && kinds.theirs.source_only;
    let copy = kinds.ours.copy && kinds.theirs.copy;
    // One group without a destination for its copies is enough to have none.
    let gather = !gather_blocks.is_empty() && gather_blocks.iter().all(|&blocks| blocks > 0);
    // R21
    kinds.require(
        in_place || gather || planted("r21_ignore_gather"),
        "source-only is missing and a gather region is empty: set gather_blocks or use a device side with source-only",
    )?;
    let equal = kinds.ours == kinds.theirs;
    if equal && in_place {
        return Ok((
            SourceKinds {
                source_only: true,
                copy: copy && (gather || planted("r3_copies_without_a_gather_region")), // R3
            },
            false,
        ));
    }
    kinds.require(!in_place, "offer the same source kinds on both sides")?; // R20
    kinds.require(
        copy || planted("r22_unverified_copy"),
        "source-only is missing and one side has no verified copy path: enable either on both sides",
    )?;
    let by_copy = SourceKinds {
        source_only: false,
        copy: true,
    };
    // Token selections are copied by nature; for block selections copying is a fallback.
    if equal && unit == SelectionUnit::Token {
        return Ok((by_copy, false));
    }
    // R22
    let asked = [ours, theirs].map(|side| side.allow_copy_fallback == Some(true));
    if asked == [false, false] && !planted("r22_unasked_fallback") {
        return Err(kinds.refused("use a device side with source-only, or set allow_copy_fallback on both sides"));
    }
    if asked[0] != asked[1] {
        let field = "allow_copy_fallback";
        let asked = Field {
            name: field,
            ours: &ours.allow_copy_fallback,
            theirs: &theirs.allow_copy_fallback,
        };
        return Err(asked.refused("ask for the fallback on both sides, or on none"));
    }
    Ok((by_copy, true))
}

/// One field, both sides.
struct Field<'a, T> {
    name: &'static str,
    ours: &'a T,
    theirs: &'a T,
}

impl<'a, T: Debug + PartialEq> Field<'a, T> {
    /// The field's two values; a missing one is refused (R20).
    fn of(name: &'static str, ours: &'a Option<T>, theirs: &'a Option<T>) -> Result<Self, CapabilityError> {
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            return Ok(Self { name, ours, theirs });
        }
        let shown = |side: &Option<T>| side.as_ref().map_or("missing".to_owned(), |value| format!("{value:?}"));
        let remedy = "run builds that both state it";
        Err(CapabilityError {
            field: name,
            ours: shown(ours),
            theirs: shown(theirs),
            remedy,
        })
    }

    fn equal(&self, remedy: &'static str) -> Result<&'a T, CapabilityError> {
        self.require(self.ours == self.theirs, remedy)?;
        Ok(self.ours)
    }

    fn require(&self, holds: bool, remedy: &'static str) -> Result<(), CapabilityError> {
        if holds { Ok(()) } else { Err(self.refused(remedy)) }
    }

    fn refused(&self, remedy: &'static str) -> CapabilityError {
        let (ours, theirs) = (format!("{:?}", self.ours), format!("{:?}", self.theirs));
        CapabilityError {
            field: self.name,
            ours,
            theirs,
            remedy,
        }
    }
}

/// Hash of everything that an address or the meaning of a byte depends on (R20).
///
/// XXH3-64 over a canonical encoding: u32 little endian for every number and tag, length before every list and string,
/// 1 and the value or 0 for an option. A change of this encoding is a change of the protocol's major version.
pub fn geometry_hash(geometry: &Geometry) -> GeometryHash {
    let mut bytes = b"kvsluice geometry 1\0".to_vec();
    let mut put = |value: u32| bytes.extend_from_slice(&value.to_le_bytes());
    put(geometry.model.len() as u32);
    geometry.model.bytes().for_each(|byte| put(u32::from(byte)));
    put(match geometry.dtype {
        _ if planted("r20_hash_ignores_dtype") => 0,
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        Dtype::Bf16 => 3,
        Dtype::Fp8 => 4,
    });
    put(geometry.ranks);
    let order = |order| match order {
        PoolOrder::LayerFirst => 1,
        PoolOrder::BlockFirst => 2,
    };
    put(geometry.groups.len() as u32);
    for group in &geometry.groups {
        put(group.block_tokens);
        match group.attention {
            Attention::Full => put(1),
            Attention::SlidingWindow { window_tokens } => [2, window_tokens].into_iter().for_each(&mut put),
        }
        [group.source_blocks, group.gather_blocks, group.device_blocks]
            .into_iter()
            .for_each(&mut put);
        for null in [
            group.source_null.map(|block| block.0),
            group.device_null.map(|block| block.0),
        ] {
            put(u32::from(null.is_some()));
            null.into_iter().for_each(&mut put);
        }
        [order(group.host_order), order(group.device_order)]
            .into_iter()
            .for_each(&mut put);
    }
    put(geometry.layers.len() as u32);
    for layer in &geometry.layers {
        put(layer.group.get());
        match layer.kv {
            KvKind::Separate { kv_heads, head_dim } => [1, kv_heads, head_dim].into_iter().for_each(&mut put),
            KvKind::Fused { kv_heads, head_dim } => [2, kv_heads, head_dim].into_iter().for_each(&mut put),
            KvKind::Latent { width } => [3, width].into_iter().for_each(&mut put),
        }
        // The number of shards, not the word for it: a latent layer is whole under either.
        put(layer.shards(geometry.ranks));
        put(u32::from(layer.alias_of.is_some()));
        layer.alias_of.into_iter().for_each(|owner| put(owner.get()));
    }
    GeometryHash(xxh3_64(&bytes))
}

#[cfg(test)]
mod tests;
