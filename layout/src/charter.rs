//! What a channel was made for, as its control segment tells it: sizes, capability and geometry.
//!
//! Every address of a channel follows from its charter. The producer of a new channel writes it once, before the
//! segment is ready, and nobody changes it afterwards; so whoever holds nothing but the control segment (an inspecting
//! reader, a producer that recovers named segments, X26) knows what all the other bytes mean.
//!
//! The area is a length, a checksum and JSON: TOML, in which people write a geometry, has no room for a 64-bit hash.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::capability::{Capability, GeometryHash, geometry_hash};
use crate::geometry::{Geometry, GeometryError};
use crate::planted::planted;
use crate::region::{RegionError, RegionMap};

/// The area's first words: bytes of the text, and their [`checksum`].
pub const CHARTER_HEAD_BYTES: usize = 16;

/// What a channel was made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charter {
    /// Bytes of the plan ring.
    pub ring_bytes: u64,
    /// Slots of each rank's write-back area.
    pub write_back_slots: u64,
    /// Bytes of one of them.
    pub write_back_slot_bytes: u64,
    /// Capability of the producer that made the channel.
    pub capability: Capability,
    /// Geometry.
    pub geometry: Geometry,
}

/// A charter that cannot be written or read: the channel starts cold, and is inspected only as far as its headers.
#[derive(Debug, Error)]
pub enum CharterError {
    /// More text than the area has room for.
    #[error("charter of {found} bytes: the control segment has room for {room}: shorten the name of the model")]
    Room {
        /// Bytes of the text.
        found: u64,
        /// Bytes of the area behind its head.
        room: u64,
    },
    /// A length that no charter has.
    #[error("charter of {found} bytes, expected at most {room}: the control segment is damaged; start cold")]
    Length {
        /// Bytes by the stored word.
        found: u64,
        /// Bytes of the segment behind its head.
        room: u64,
    },
    /// The text is another one than was written.
    #[error("charter: checksum is {found:016x}, expected {expected:016x}: the control segment is damaged; start cold")]
    Checksum {
        /// The checksum stored.
        found: u64,
        /// The text's own.
        expected: u64,
    },
    /// The text is no charter.
    #[error("charter: {0}")]
    Text(#[from] serde_json::Error),
    /// The geometry breaks a rule.
    #[error("charter: {0}")]
    Geometry(#[from] GeometryError),
    /// The sizes break a rule.
    #[error("charter: {0}")]
    Region(#[from] RegionError),
    /// The capability speaks of another geometry.
    #[error("charter: geometry hash is {found:?}, expected {expected:?}: the control segment is damaged; start cold")]
    Hash {
        /// Hash of the geometry.
        found: GeometryHash,
        /// The capability's, or none.
        expected: Option<GeometryHash>,
    },
}

/// The checksum of a charter's text: XXH3-64.
pub fn checksum(text: &[u8]) -> u64 {
    xxh3_64(text)
}

impl Charter {
    /// The charter of a channel with these regions.
    pub fn new(geometry: &Geometry, map: &RegionMap, capability: &Capability) -> Self {
        Self {
            ring_bytes: map.ring_bytes() as u64,
            write_back_slots: map.write_back_slots() as u64,
            write_back_slot_bytes: map.write_back_slot_bytes() as u64,
            capability: capability.clone(),
            geometry: geometry.clone(),
        }
    }

    /// Where everything lies in the channel's segments.
    ///
    /// # Errors
    /// [`RegionError`] for sizes that no channel has.
    pub fn map(&self) -> Result<RegionMap, RegionError> {
        // A size that does not fit this machine's words is refused as one that is too large.
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        RegionMap::new(
            &self.geometry,
            size(self.ring_bytes),
            size(self.write_back_slots),
            size(self.write_back_slot_bytes),
        )
    }

    /// The text to store.
    ///
    /// # Errors
    /// [`CharterError::Room`] where it is longer than `room` bytes.
    pub fn to_text(&self, room: usize) -> Result<Vec<u8>, CharterError> {
        let text = serde_json::to_vec(self)?;
        if text.len() > room {
            let (found, room) = (text.len() as u64, room as u64);
            return Err(CharterError::Room { found, room });
        }
        Ok(text)
    }

    /// Reads a private copy of a text.
    ///
    /// # Errors
    /// [`CharterError`] for the first rule that it breaks: checksum, form, geometry, sizes, geometry hash.
    pub fn from_text(text: &[u8], stored_checksum: u64) -> Result<Self, CharterError> {
        let expected = checksum(text);
        if stored_checksum != expected && !planted("x26_charter_checksum_unread") {
            return Err(CharterError::Checksum {
                found: stored_checksum,
                expected,
            });
        }
        let charter: Self = serde_json::from_slice(text)?;
        charter.geometry.validate()?;
        charter.map()?;
        let (found, expected) = (geometry_hash(&charter.geometry), charter.capability.geometry_hash);
        if expected != Some(found) {
            return Err(CharterError::Hash { found, expected });
        }
        Ok(charter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::{SelectionUnit, SourceKinds};
    use crate::geometry::{
        Attention, Dtype, GroupSpec, KvKind, LayerSpec, MAX_BLOCKS, MAX_GROUPS, MAX_LAYERS, MAX_MODEL_NAME_BYTES,
        PoolOrder, Sharding,
    };
    use crate::ids::{DecoderLayer, GroupId, MAX_RANKS, PhysicalBlock, ProcessEpoch, SourceBlock};
    use crate::presets::{names, preset};
    use crate::region::MIN_RING_BYTES;

    fn charter(geometry: &Geometry) -> (Charter, RegionMap) {
        let map = RegionMap::new(geometry, MIN_RING_BYTES, 8, 256).expect("regions");
        let kinds = SourceKinds {
            source_only: true,
            copy: true,
        };
        let mut capability = Capability::of(geometry, SelectionUnit::Token, kinds, ProcessEpoch(u64::MAX));
        capability.allow_copy_fallback = Some(false);
        (Charter::new(geometry, &map, &capability), map)
    }

    /// Every field as long as it gets.
    fn longest() -> Geometry {
        let group = GroupSpec {
            block_tokens: u32::MAX,
            attention: Attention::SlidingWindow {
                window_tokens: u32::MAX,
            },
            source_blocks: MAX_BLOCKS,
            gather_blocks: MAX_BLOCKS,
            device_blocks: MAX_BLOCKS,
            source_null: Some(SourceBlock(MAX_BLOCKS - 1)),
            device_null: Some(PhysicalBlock(MAX_BLOCKS - 1)),
            host_order: PoolOrder::LayerFirst,
            device_order: PoolOrder::LayerFirst,
        };
        let layer = LayerSpec {
            group: GroupId(MAX_GROUPS as u32 - 1),
            kv: KvKind::Separate {
                kv_heads: u32::MAX,
                head_dim: u32::MAX,
            },
            sharding: Sharding::Replicated,
            alias_of: Some(DecoderLayer(MAX_LAYERS as u32 - 1)),
        };
        Geometry {
            // The longest escape there is.
            model: "\u{1}".repeat(MAX_MODEL_NAME_BYTES),
            dtype: Dtype::Bf16,
            ranks: MAX_RANKS,
            groups: vec![group; MAX_GROUPS],
            layers: vec![layer; MAX_LAYERS],
        }
    }

    #[test]
    fn x26_every_preset_comes_back_from_its_charter_with_every_address() {
        for name in names() {
            let (charter, map) = charter(&preset(name).expect("preset"));
            let text = charter.to_text(map.charter_room()).expect("room");
            let back = Charter::from_text(&text, checksum(&text)).expect(name);
            assert_eq!(back, charter);
            assert_eq!(back.map().expect("regions"), map, "{name}");
        }
    }

    #[test]
    fn x8_the_longest_charter_has_room_and_so_have_those_of_few_groups_or_layers() {
        for (groups, layers) in [(1, 1), (MAX_GROUPS, 1), (1, MAX_LAYERS), (MAX_GROUPS, MAX_LAYERS)] {
            let mut geometry = longest();
            geometry.groups.truncate(groups);
            geometry.layers.truncate(layers);
            let (charter, map) = charter(&geometry);
            let text = charter.to_text(usize::MAX).expect("text");
            assert!(
                text.len() <= map.charter_room(),
                "{groups} groups, {layers} layers: {} bytes in {}",
                text.len(),
                map.charter_room()
            );
        }
    }

    #[test]
    fn x26_a_charter_that_is_damaged_is_refused_by_the_field_that_says_so() {
        let (mut good, _) = charter(&preset("sample-hybrid").expect("preset"));
        let text = good.to_text(usize::MAX).expect("text");
        let said = |text: &[u8]| {
            Charter::from_text(text, checksum(text))
                .expect_err("refused")
                .to_string()
        };
        let changed = Charter::from_text(&text, 7).expect_err("refused").to_string();
        assert!(
            changed.contains("charter: checksum is 0000000000000007, expected "),
            "{changed}"
        );
        assert!(said(&text[..text.len() - 1]).contains("charter: EOF while parsing"));
        assert!(said(&vec![b'['; 1 << 16]).contains("charter: invalid type"));
        let room = good.to_text(100).expect_err("refused").to_string();
        assert!(room.contains("the control segment has room for 100"), "{room}");

        good.ring_bytes = 100;
        let text = good.to_text(usize::MAX).expect("text");
        assert!(said(&text).contains("charter: ring of 100 bytes: expected a power of two"));
        good.ring_bytes = MIN_RING_BYTES as u64;
        good.geometry.groups[0].gather_blocks += 1;
        let text = good.to_text(usize::MAX).expect("text");
        assert!(said(&text).contains("charter: geometry hash is "), "{}", said(&text));
        good.geometry.ranks = 0;
        let text = good.to_text(usize::MAX).expect("text");
        assert!(said(&text).contains("charter: geometry field ranks: found 0, expected 1 to 64"));
    }
}
