//! Who keeps a physical block alive (R8, R54, R55): one owner per group, apart from every attention table.
//!
//! One allocation carries the KV of all layers of its group. A block is free only when all layers of all requests that
//! name it, all sharers and all transfers that read or write it are gone; each of them alone keeps it. A table can change
//! without the owner's set changing, and the other way round.
#![forbid(unsafe_code)]

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{BlockCount, GroupId, PhysicalBlock};
use kvsluice_layout::planted::planted;
use thiserror::Error;

/// What refers to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reference {
    /// A valid slot of one layer of one request.
    Layer,
    /// Another request that shares the block.
    Regular,
    /// The prefix cache.
    Prefix,
    /// A transfer or a replayed graph that has not ended: as source or as destination.
    Transfer,
}

/// How many of each kind refer to one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Slots of layers.
    pub layers: u32,
    /// Requests that share the block.
    pub regular: u32,
    /// Prefix-cache entries.
    pub prefix: u32,
    /// Transfers that have not ended.
    pub transfers: u32,
}

impl References {
    /// R54: the block lives while this is not 0.
    pub fn total(&self) -> u64 {
        let transfers = if planted("r54_ignores_transfers") {
            0
        } else {
            self.transfers
        };
        let prefix = if planted("r54_ignores_prefix") { 0 } else { self.prefix };
        u64::from(self.layers) + u64::from(self.regular) + u64::from(prefix) + u64::from(transfers)
    }

    fn of(&mut self, kind: Reference) -> &mut u32 {
        match kind {
            Reference::Layer => &mut self.layers,
            Reference::Regular => &mut self.regular,
            Reference::Prefix => &mut self.prefix,
            Reference::Transfer => &mut self.transfers,
        }
    }
}

/// Why a reference or an allocation was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OwnerError {
    /// Not enough free blocks.
    #[error("{wanted} blocks of {group:?} wanted, {free} free: retain less or finish a request")]
    Exhausted {
        /// The group.
        group: GroupId,
        /// Blocks asked for.
        wanted: BlockCount,
        /// Blocks free.
        free: BlockCount,
    },
    /// There is no such group.
    #[error("no owner for {group:?}")]
    UnknownGroup {
        /// The group.
        group: GroupId,
    },
    /// The block does not exist or is free.
    #[error("{block:?} of {group:?} is not owned")]
    NotOwned {
        /// The group.
        group: GroupId,
        /// The block.
        block: PhysicalBlock,
    },
    /// The block does not exist or is owned already.
    #[error("{block:?} of {group:?} is not free")]
    NotFree {
        /// The group.
        group: GroupId,
        /// The block.
        block: PhysicalBlock,
    },
    /// A reference of this kind does not exist.
    #[error("{block:?} of {group:?} has no {kind:?} reference to give up")]
    NoReference {
        /// The group.
        group: GroupId,
        /// The block.
        block: PhysicalBlock,
        /// The kind.
        kind: Reference,
    },
}

/// All physical blocks of one group.
#[derive(Clone, Debug)]
pub struct Owner {
    group: GroupId,
    blocks: Vec<References>,
    /// A stack: the last freed is the next allocated, as it is warm.
    free: Vec<PhysicalBlock>,
}

impl Owner {
    /// An owner of `blocks` free blocks.
    pub fn new(group: GroupId, blocks: BlockCount) -> Self {
        Self {
            group,
            blocks: vec![References::default(); blocks.index()],
            free: (0..blocks.get()).rev().map(PhysicalBlock).collect(),
        }
    }

    /// The group.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Appends `wanted` blocks to `out`, each with one [`Reference::Transfer`]: they are destinations until their upload
    /// ends.
    pub fn allocate(&mut self, wanted: BlockCount, out: &mut Vec<PhysicalBlock>) -> Result<(), OwnerError> {
        let Some(rest) = self.free.len().checked_sub(wanted.index()) else {
            return Err(OwnerError::Exhausted {
                group: self.group,
                wanted,
                free: self.free_blocks(),
            });
        };
        for block in self.free.drain(rest..).rev() {
            if let Some(references) = self.blocks.get_mut(block.index()) {
                references.transfers = 1;
            }
            out.push(block);
        }
        Ok(())
    }

    /// Takes free blocks that are in use already, each with one [`Reference::Transfer`] until the caller has named them:
    /// what an earlier producer had handed out (X25). Whole or nothing.
    pub fn claim(&mut self, blocks: &[PhysicalBlock]) -> Result<(), OwnerError> {
        let group = self.group;
        for (at, &block) in blocks.iter().enumerate() {
            match self.blocks.get_mut(block.index()) {
                Some(references) if references.total() == 0 => references.transfers = 1,
                _ => {
                    for claimed in blocks.iter().take(at) {
                        if let Some(references) = self.blocks.get_mut(claimed.index()) {
                            *references = References::default();
                        }
                    }
                    return Err(OwnerError::NotFree { group, block });
                }
            }
        }
        let references = &self.blocks;
        self.free
            .retain(|block| references.get(block.index()).is_some_and(|of| of.total() == 0));
        Ok(())
    }

    /// One more reference to an owned block.
    pub fn acquire(&mut self, block: PhysicalBlock, kind: Reference) -> Result<(), OwnerError> {
        let group = self.group;
        match self.blocks.get_mut(block.index()) {
            Some(references) if references.total() > 0 => {
                *references.of(kind) += 1;
                Ok(())
            }
            _ => Err(OwnerError::NotOwned { group, block }),
        }
    }

    /// One reference less. True if it was the last: the block is free now (R54). While others remain, only their number
    /// went down (R55).
    pub fn release(&mut self, block: PhysicalBlock, kind: Reference) -> Result<bool, OwnerError> {
        let group = self.group;
        let references = self
            .blocks
            .get_mut(block.index())
            .ok_or(OwnerError::NotOwned { group, block })?;
        let count = references.of(kind);
        *count = count
            .checked_sub(1)
            .ok_or(OwnerError::NoReference { group, block, kind })?;
        let last = references.total() == 0 || planted("r54_r55_frees_shared");
        if last {
            self.free.push(block);
        }
        Ok(last)
    }

    /// What refers to `block`; all zero if it is free or does not exist.
    pub fn references(&self, block: PhysicalBlock) -> References {
        self.blocks.get(block.index()).copied().unwrap_or_default()
    }

    /// The references of every block, in block order.
    pub fn all_references(&self) -> &[References] {
        &self.blocks
    }

    /// The free blocks, the next to be allocated last.
    pub fn free(&self) -> &[PhysicalBlock] {
        &self.free
    }

    /// Number of free blocks.
    pub fn free_blocks(&self) -> BlockCount {
        BlockCount(u32::try_from(self.free.len()).unwrap_or(u32::MAX))
    }
}

/// The owners of all groups.
#[derive(Clone, Debug)]
pub struct Owners(Vec<Owner>);

impl Owners {
    /// Owners with the given number of blocks per group. Of a repeated group the first counts.
    pub fn new(groups: impl IntoIterator<Item = (GroupId, BlockCount)>) -> Self {
        let mut owners: Vec<Owner> = groups
            .into_iter()
            .map(|(group, blocks)| Owner::new(group, blocks))
            .collect();
        owners.sort_by_key(|owner| owner.group);
        owners.dedup_by_key(|owner| owner.group);
        Self(owners)
    }

    /// Owners of the device pools of a geometry. All blocks are free but the null blocks, which are never handed out.
    ///
    /// # Errors
    /// None for a geometry that was validated.
    pub fn of_geometry(geometry: &Geometry) -> Result<Self, OwnerError> {
        let groups = || (0..).map(GroupId).zip(&geometry.groups);
        let mut owners = Self::new(groups().map(|(group, spec)| (group, BlockCount(spec.device_blocks))));
        for (group, spec) in groups() {
            let Some(null) = spec.device_null.filter(|null| null.get() < spec.device_blocks) else {
                continue;
            };
            let owner = owners.of(group)?;
            let mut blocks = Vec::new();
            owner.allocate(BlockCount(null.get() + 1), &mut blocks)?;
            for block in blocks.into_iter().rev().filter(|block| *block != null) {
                owner.release(block, Reference::Transfer)?;
            }
        }
        Ok(owners)
    }

    /// The owner of `group`.
    pub fn of(&mut self, group: GroupId) -> Result<&mut Owner, OwnerError> {
        let index = self.0.binary_search_by_key(&group, |owner| owner.group);
        let owner = index.ok().and_then(|index| self.0.get_mut(index));
        owner.ok_or(OwnerError::UnknownGroup { group })
    }

    /// All owners, by group.
    pub fn all(&self) -> &[Owner] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    const KINDS: [Reference; 4] = [
        Reference::Layer,
        Reference::Regular,
        Reference::Prefix,
        Reference::Transfer,
    ];

    fn one_block() -> (Owner, PhysicalBlock) {
        let mut owner = Owner::new(GroupId(3), BlockCount(1));
        let mut out = Vec::new();
        owner.allocate(BlockCount(1), &mut out).unwrap();
        (owner, out[0])
    }

    /// True if a block that only `kind` refers to is not free.
    fn keeps(kind: Reference) -> bool {
        let (mut owner, block) = one_block();
        owner.acquire(block, kind).unwrap();
        let freed = owner.release(block, Reference::Transfer).unwrap();
        assert_eq!(freed, owner.free_blocks() == BlockCount(1));
        !freed
    }

    #[test]
    fn r54_each_kind_of_reference_alone_keeps_a_block() {
        for kind in KINDS {
            assert!(keeps(kind), "{kind:?}");
        }
        for (fault, kind) in [
            ("r54_ignores_transfers", Reference::Transfer),
            ("r54_ignores_prefix", Reference::Prefix),
            ("r54_r55_frees_shared", Reference::Regular),
        ] {
            assert!(
                !with_planted(fault, || keeps_from_layer(kind)),
                "the planted fault {fault} is not seen"
            );
        }
    }

    /// Like [`keeps`], with a layer giving up the block last, so that only `kind` can keep it.
    fn keeps_from_layer(kind: Reference) -> bool {
        let (mut owner, block) = one_block();
        owner.blocks[0] = References {
            layers: 1,
            ..References::default()
        };
        owner.acquire(block, kind).unwrap();
        !owner.release(block, Reference::Layer).unwrap()
    }

    #[test]
    fn r55_giving_up_a_shared_block_only_lowers_its_count() {
        let (mut owner, block) = one_block();
        for kind in [Reference::Layer, Reference::Layer, Reference::Prefix] {
            owner.acquire(block, kind).unwrap();
        }
        let freed = [Reference::Transfer, Reference::Layer, Reference::Layer].map(|kind| owner.release(block, kind));
        assert_eq!(freed, [Ok(false); 3]);
        assert_eq!(
            owner.references(block),
            References {
                prefix: 1,
                ..References::default()
            }
        );
        assert_eq!(owner.release(block, Reference::Prefix), Ok(true));
    }

    #[test]
    fn r54_what_is_not_owned_cannot_be_referred_to_or_given_up() {
        let (mut owner, block) = one_block();
        let kind = Reference::Layer;
        assert_eq!(
            owner.release(block, kind),
            Err(OwnerError::NoReference {
                group: GroupId(3),
                block,
                kind
            })
        );
        assert_eq!(owner.release(block, Reference::Transfer), Ok(true));
        assert_eq!(
            owner.acquire(block, kind),
            Err(OwnerError::NotOwned {
                group: GroupId(3),
                block
            })
        );
        assert!(owner.acquire(PhysicalBlock(u32::MAX), kind).is_err());
        assert!(owner.release(PhysicalBlock(u32::MAX), kind).is_err());
    }

    #[test]
    fn x9_a_null_block_is_owned_from_the_start_and_everything_else_is_free() {
        let mut geometry = kvsluice_layout::presets::preset("sample-hybrid").unwrap();
        let blocks = geometry.groups[0].device_blocks;
        // The last of these lies outside: it takes no block away.
        for null in [None, Some(0), Some(1), Some(2), Some(blocks - 1), Some(blocks)] {
            geometry.groups[0].device_null = null.map(PhysicalBlock);
            let mut owners = Owners::of_geometry(&geometry).unwrap();
            let taken = null.filter(|null| *null < blocks).map(PhysicalBlock);
            let owner = owners.of(GroupId(0)).unwrap();
            assert_eq!(owner.group(), GroupId(0));
            let mut free = owner.free().to_vec();
            free.sort_unstable();
            let expected: Vec<_> = (0..blocks)
                .map(PhysicalBlock)
                .filter(|block| Some(*block) != taken)
                .collect();
            assert_eq!(free, expected, "{null:?}");
            let mut out = Vec::new();
            owner.allocate(BlockCount(1), &mut out).unwrap();
            assert_eq!(out, expected[..1], "the lowest comes first");
        }
        assert_eq!(
            Owners::of_geometry(&geometry).unwrap().all().len(),
            geometry.groups.len()
        );
    }

    #[test]
    fn x25_blocks_in_use_are_claimed_once_and_all_or_none() {
        let mut owner = Owner::new(GroupId(0), BlockCount(4));
        let claim = |owner: &mut Owner, blocks: &[u32]| {
            owner.claim(&blocks.iter().copied().map(PhysicalBlock).collect::<Vec<_>>())
        };
        for wrong in [&[1, 1][..], &[2, 4]] {
            assert!(matches!(claim(&mut owner, wrong), Err(OwnerError::NotFree { .. })));
            assert_eq!(owner.free_blocks(), BlockCount(4), "{wrong:?} changes nothing");
        }
        assert_eq!(claim(&mut owner, &[1, 2]), Ok(()));
        assert!(claim(&mut owner, &[0, 2]).is_err());
        let mut out = Vec::new();
        owner.allocate(BlockCount(2), &mut out).unwrap();
        assert_eq!(
            out,
            [PhysicalBlock(0), PhysicalBlock(3)],
            "what is claimed is not handed out"
        );
        assert_eq!(owner.release(PhysicalBlock(2), Reference::Transfer), Ok(true));
    }

    #[test]
    fn an_allocation_is_whole_or_nothing() {
        let mut owner = Owner::new(GroupId(0), BlockCount(3));
        let mut out = Vec::new();
        assert!(matches!(
            owner.allocate(BlockCount(4), &mut out),
            Err(OwnerError::Exhausted { .. })
        ));
        assert_eq!((out.len(), owner.free_blocks()), (0, BlockCount(3)));
        owner.allocate(BlockCount(2), &mut out).unwrap();
        assert_eq!(out, [PhysicalBlock(0), PhysicalBlock(1)]);
    }
}
