//! The dictionary: one newtype per space of numbers, so that no two spaces mix (R18).
//!
//! A token position, a logical block of a sequence, a resident slot and a physical block are all small integers; a
//! wrong one is a silent corruption. Each has its own type here and there are no conversions between them, except the
//! two that a plan needs: a physical block named as the target of an upload is a [`DestinationBlock`], and back.
//!
//! ```compile_fail,E0308
//! use kvsluice_layout::ids::{LogicalBlock, ResidentSlot};
//! let slot: ResidentSlot = LogicalBlock(7); // R18
//! ```

use core::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($repr:ty), $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            /// The bare number, for arithmetic at a boundary.
            #[inline(always)]
            pub const fn get(self) -> $repr {
                self.0
            }

            /// The number as an index of a slice.
            #[inline(always)]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

// Coordinates of a sequence.
number!(/// Position of a token in its sequence, from 0.
    TokenPosition(u32), "token");
number!(/// Block of the original sequence: tokens [n·B, (n+1)·B) for a group of block size B.
    LogicalBlock(u32), "logical block");
number!(/// Place in a request's block table of one layer: what attention iterates over.
    ResidentSlot(u32), "slot");
number!(/// Number of tokens.
    TokenCount(u32), "tokens");
number!(/// Number of blocks.
    BlockCount(u32), "blocks");

// Places in memory. Each is per group: (group, id) is the lease key (X5).
number!(/// Block of the device pool of one group, in the page tables of the engine.
    PhysicalBlock(u32), "physical block");
number!(/// Block of the host pool of one group: where an upload reads.
    SourceBlock(u32), "source block");
number!(/// Physical block that a plan writes.
    DestinationBlock(u32), "destination block");

// The model.
number!(/// Decoder layer of the model, from 0.
    DecoderLayer(u32), "layer");
number!(/// KV-cache group: the layers that share one allocation of blocks.
    GroupId(u32), "group");
number!(/// Row of one plan, from 0.
    RowIndex(u32), "row");
number!(/// Tensor-parallel rank, from 0. At most 64 ranks share a channel.
    Rank(u32), "rank");

// Identity and order.
number!(/// Epoch of one process start: random, never 0, never a pid (X22).
    ProcessEpoch(u64), "process epoch");
number!(/// Epoch of one life of a request id; orders across restarts (X22).
    RequestEpoch(u64), "request epoch");
number!(/// Operation of one request epoch; only grows within it.
    OperationId(u64), "operation");
number!(/// Generation of all device pools; a Reset raises it (X24a).
    PoolGeneration(u64), "pool generation");
number!(/// Revision g of a request's residency: advances only on committed bytes (R44).
    MapRevision(u64), "map revision");
number!(/// Revision r of a request's selection: advances also without bytes (R44).
    SelectionRevision(u64), "selection revision");
number!(/// Byte position in the plan ring; only grows, never reused, a multiple of 64.
    Position(u64), "position");
number!(/// Number of a channel's takeover: raised by each new producer (X22).
    Incarnation(u64), "incarnation");
number!(/// Random identity of a channel.
    ChannelId(u64), "channel");

impl From<PhysicalBlock> for DestinationBlock {
    fn from(block: PhysicalBlock) -> Self {
        Self(block.0)
    }
}

impl From<DestinationBlock> for PhysicalBlock {
    fn from(block: DestinationBlock) -> Self {
        Self(block.0)
    }
}

/// Most ranks on one channel: one bit each in a `u64` mask.
pub const MAX_RANKS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r18_each_space_has_its_own_type_and_name() {
        // Different numbers in every space: logical 7 in slot 2 at physical 19 from source 105.
        assert_eq!(format!("{:?}", LogicalBlock(7)), "logical block 7");
        assert_eq!(format!("{:?}", ResidentSlot(2)), "slot 2");
        assert_eq!(format!("{:?}", PhysicalBlock(19)), "physical block 19");
        assert_eq!(format!("{:?}", SourceBlock(105)), "source block 105");
        assert_eq!(DestinationBlock::from(PhysicalBlock(19)), DestinationBlock(19));
    }
}
