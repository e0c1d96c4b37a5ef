//! The rules that a geometry obeys.

use core::fmt::Display;

use super::{
    Attention, Geometry, GeometryError, GroupSpec, KvKind, LayerSpec, MAX_BLOCKS, MAX_GROUPS, MAX_LAYERS,
    MAX_MODEL_NAME_BYTES, Sharding,
};
use crate::ids::MAX_RANKS;

impl Geometry {
    /// Checks every rule that does not need the sizes of the pools; those are checked as the map is made.
    ///
    /// # Errors
    /// [`GeometryError::Field`] for the first field that breaks its rule.
    pub fn validate(&self) -> Result<(), GeometryError> {
        let name_fits = (1..=MAX_MODEL_NAME_BYTES).contains(&self.model.len());
        let expected = format!("1 to {MAX_MODEL_NAME_BYTES} bytes");
        require(
            name_fits,
            "model",
            format!("{:?}", self.model),
            expected,
            "name the model",
        )?;
        between("ranks", self.ranks, MAX_RANKS, "set the tensor-parallel size")?;
        between(
            "groups",
            self.groups.len(),
            MAX_GROUPS,
            "describe the model within the limit",
        )?;
        between(
            "layers",
            self.layers.len(),
            MAX_LAYERS,
            "describe the model within the limit",
        )?;
        for (index, group) in self.groups.iter().enumerate() {
            group.validate(index)?;
            let used = self.layers.iter().any(|layer| layer.group.index() == index);
            let remedy = "remove the group or give it a layer";
            require(
                used,
                format!("groups[{index}]"),
                "no layer",
                "at least one layer that names the group",
                remedy,
            )?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            self.validate_layer(index, layer)?;
        }
        Ok(())
    }

    fn validate_layer(&self, index: usize, layer: &LayerSpec) -> Result<(), GeometryError> {
        let field = |name: &str| format!("layers[{index}].{name}");
        let expected = format!("below the number of groups, {}", self.groups.len());
        let remedy = "name a group of this geometry";
        require(
            self.group(layer.group).is_some(),
            field("group"),
            layer.group,
            expected,
            remedy,
        )?;
        match layer.kv {
            KvKind::Separate { kv_heads, head_dim } | KvKind::Fused { kv_heads, head_dim } => {
                between(field("kv.kv_heads"), kv_heads, u32::MAX, MODEL_SIZES)?;
                between(field("kv.head_dim"), head_dim, u32::MAX, MODEL_SIZES)?;
                let whole = kv_heads.is_multiple_of(self.ranks) || self.ranks.is_multiple_of(kv_heads);
                let fits = layer.sharding == Sharding::Replicated || whole;
                let expected = format!("a multiple or a divisor of ranks = {}", self.ranks);
                let remedy = "choose another tensor-parallel size, or sharding = \"replicated\"";
                require(fits, field("kv.kv_heads"), kv_heads, expected, remedy)?;
            }
            KvKind::Latent { width } => between(field("kv.width"), width, u32::MAX, MODEL_SIZES)?,
        }
        let Some(target) = layer.alias_of else { return Ok(()) };
        // Only earlier layers, so that aliases form no cycle and one pass resolves them.
        let remedy = "let the later of the two layers be the alias";
        let expected = format!("a layer before {index}");
        require(target.index() < index, field("alias_of"), target, expected, remedy)?;
        let shape = |layer: &LayerSpec| (layer.group, layer.kv, layer.shards(self.ranks));
        let same = self.layer(target).is_some_and(|owner| shape(owner) == shape(layer));
        let remedy = "alias only layers that share one tensor";
        require(
            same,
            field("alias_of"),
            target,
            "a layer of the same group, kv and sharding",
            remedy,
        )
    }
}

impl GroupSpec {
    fn validate(&self, index: usize) -> Result<(), GeometryError> {
        let field = |name: &str| format!("groups[{index}].{name}");
        between(
            field("block_tokens"),
            self.block_tokens,
            u32::MAX,
            "set the block size of the engine",
        )?;
        if let Attention::SlidingWindow { window_tokens } = self.attention {
            between(
                field("attention.sliding_window.window_tokens"),
                window_tokens,
                u32::MAX,
                MODEL_SIZES,
            )?;
        }
        between(
            field("source_blocks"),
            self.source_blocks,
            MAX_BLOCKS,
            "set the size of the host pool",
        )?;
        between(
            field("device_blocks"),
            self.device_blocks,
            MAX_BLOCKS,
            "set the size of the device pool",
        )?;
        let fits = self.gather_blocks <= self.source_blocks;
        let expected = format!("at most source_blocks = {}", self.source_blocks);
        let remedy = "the gather region is part of the host pool: shrink it or grow the pool";
        require(fits, field("gather_blocks"), self.gather_blocks, expected, remedy)?;
        if let Some(null) = self.source_null {
            // A null block inside the gather region would be handed out as a place to gather into.
            let start = self.gather_start();
            let expected = format!("below the gather region, which starts at {start}");
            require(
                null < start,
                field("source_null"),
                null,
                expected,
                "name a block of the host pool",
            )?;
        }
        if let Some(null) = self.device_null {
            let fits = null.get() < self.device_blocks;
            let expected = format!("below device_blocks = {}", self.device_blocks);
            require(
                fits,
                field("device_null"),
                null,
                expected,
                "name a block of the device pool",
            )?;
        }
        Ok(())
    }
}

const MODEL_SIZES: &str = "take the size from the model's configuration";

fn require(
    holds: bool,
    field: impl Into<String>,
    found: impl Display,
    expected: impl Into<String>,
    remedy: &'static str,
) -> Result<(), GeometryError> {
    if holds {
        return Ok(());
    }
    Err(GeometryError::Field {
        field: field.into(),
        found: found.to_string(),
        expected: expected.into(),
        remedy,
    })
}

/// Requires 1 ≤ `found` ≤ `most`.
fn between<T: Display + PartialOrd + From<u8>>(
    field: impl Into<String>,
    found: T,
    most: T,
    remedy: &'static str,
) -> Result<(), GeometryError> {
    let holds = found >= T::from(1) && found <= most;
    require(holds, field, found, format!("1 to {most}"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DecoderLayer, GroupId, PhysicalBlock, SourceBlock};

    const TEXT: &str = r#"
        model = "two groups"
        dtype = "bf16"
        ranks = 2

        [[groups]]
        block_tokens = 16
        source_blocks = 8
        device_blocks = 4
        device_null = 0

        [[groups]]
        block_tokens = 32
        attention = { sliding_window = { window_tokens = 64 } }
        source_blocks = 8
        gather_blocks = 2
        device_blocks = 4
        host_order = "block_first"

        [[layers]]
        group = 0
        kv = { separate = { kv_heads = 4, head_dim = 8 } }

        [[layers]]
        group = 1
        kv = { latent = { width = 36 } }

        [[layers]]
        group = 0
        kv = { separate = { kv_heads = 4, head_dim = 8 } }
        alias_of = 0
    "#;

    fn refused(change: impl FnOnce(&mut Geometry)) -> String {
        let mut geometry = Geometry::from_toml(TEXT).unwrap();
        change(&mut geometry);
        match geometry.validate() {
            Err(GeometryError::Field { field, .. }) => field,
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn x8_a_geometry_survives_toml_unchanged() {
        let geometry = Geometry::from_toml(TEXT).unwrap();
        let again = Geometry::from_toml(&toml::to_string(&geometry).unwrap()).unwrap();
        assert_eq!(geometry, again);
        assert_eq!(
            geometry.groups[0].gather_start(),
            SourceBlock(8),
            "R3: K = N unless asked otherwise"
        );
        assert_eq!(geometry.groups[1].gather_start(), SourceBlock(6));
        assert_eq!(geometry.groups[0].device_null, Some(PhysicalBlock(0)));
        assert_eq!(geometry.token_bytes(), (2 * 4 * 8 + 36) * 2);
    }

    #[test]
    fn x8_each_broken_field_is_refused_by_its_own_name() {
        assert_eq!(refused(|g| g.model.clear()), "model");
        assert_eq!(refused(|g| g.ranks = 0), "ranks");
        assert_eq!(refused(|g| g.ranks = 65), "ranks");
        assert_eq!(refused(|g| g.groups.clear()), "groups");
        assert_eq!(
            refused(|g| g.groups = vec![g.groups[0].clone(); MAX_GROUPS + 1]),
            "groups"
        );
        assert_eq!(refused(|g| g.layers.clear()), "layers");
        assert_eq!(
            refused(|g| g.layers = vec![g.layers[0].clone(); MAX_LAYERS + 1]),
            "layers"
        );
        assert_eq!(refused(|g| g.groups[1].block_tokens = 0), "groups[1].block_tokens");
        assert_eq!(refused(|g| g.groups[0].source_blocks = 0), "groups[0].source_blocks");
        assert_eq!(
            refused(|g| g.groups[0].source_blocks = MAX_BLOCKS + 1),
            "groups[0].source_blocks"
        );
        assert_eq!(refused(|g| g.groups[0].device_blocks = 0), "groups[0].device_blocks");
        assert_eq!(refused(|g| g.groups[1].gather_blocks = 9), "groups[1].gather_blocks");
        assert_eq!(
            refused(|g| g.groups[1].source_null = Some(SourceBlock(6))),
            "groups[1].source_null"
        );
        assert_eq!(
            refused(|g| g.groups[1].device_null = Some(PhysicalBlock(4))),
            "groups[1].device_null"
        );
        let no_window = Attention::SlidingWindow { window_tokens: 0 };
        assert_eq!(
            refused(|g| g.groups[1].attention = no_window),
            "groups[1].attention.sliding_window.window_tokens"
        );
        assert_eq!(
            refused(|g| g.layers[1].group = GroupId(0)),
            "groups[1]",
            "a group without a layer"
        );
        assert_eq!(refused(|g| g.layers[0].group = GroupId(2)), "layers[0].group");
        assert_eq!(
            refused(|g| g.layers[1].kv = KvKind::Latent { width: 0 }),
            "layers[1].kv.width"
        );
        let fused = |kv_heads, head_dim| KvKind::Fused { kv_heads, head_dim };
        assert_eq!(refused(|g| g.layers[1].kv = fused(0, 8)), "layers[1].kv.kv_heads");
        assert_eq!(refused(|g| g.layers[1].kv = fused(2, 0)), "layers[1].kv.head_dim");
        assert_eq!(
            refused(|g| g.layers[1].kv = fused(3, 8)),
            "layers[1].kv.kv_heads",
            "3 heads over 2 ranks"
        );
        assert_eq!(
            refused(|g| g.layers[0].alias_of = Some(DecoderLayer(0))),
            "layers[0].alias_of",
            "itself"
        );
        assert_eq!(
            refused(|g| g.layers[0].alias_of = Some(DecoderLayer(2))),
            "layers[0].alias_of",
            "a later layer"
        );
        assert_eq!(
            refused(|g| g.layers[2].alias_of = Some(DecoderLayer(1))),
            "layers[2].alias_of",
            "another group"
        );
        assert_eq!(
            refused(|g| g.layers[2].sharding = Sharding::Replicated),
            "layers[2].alias_of",
            "another sharding"
        );
    }

    #[test]
    fn x8_a_refusal_names_field_found_expected_and_remedy() {
        let mut geometry = Geometry::from_toml(TEXT).unwrap();
        geometry.layers[0].kv = KvKind::Separate {
            kv_heads: 3,
            head_dim: 8,
        };
        assert_eq!(
            geometry.validate().unwrap_err().to_string(),
            "geometry field layers[0].kv.kv_heads: found 3, expected a multiple or a divisor of ranks = 2; \
             choose another tensor-parallel size, or sharding = \"replicated\""
        );
    }

    #[test]
    fn x8_a_misspelt_field_is_refused_instead_of_taking_its_default() {
        let error = Geometry::from_toml(&TEXT.replace("gather_blocks", "gather_block")).unwrap_err();
        assert!(error.to_string().contains("gather_block"), "{error}");
    }
}
