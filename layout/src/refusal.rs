//! Why a plan is refused: by the producer before it publishes, and by the worker before any copy (X9).

use thiserror::Error;

/// A plan that may not run. Found by the same checks on both sides; a worker answers `Rejected` with the code.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Refusal {
    /// The bytes are not those that the writer summed up.
    #[error("checksum: found {found:#018x}, expected {expected:#018x}: the record was changed after it was written")]
    Checksum {
        /// Checksum word of the record.
        found: u64,
        /// Sum of the bytes.
        expected: u64,
    },
    /// Another major version of the record format.
    #[error("record version: found {found:#06x}, expected major {expected:#06x}: run both sides from one release")]
    Version {
        /// Version of the record.
        found: u16,
        /// Version of this build.
        expected: u16,
    },
    /// A must-understand bit that this build does not know (X4).
    #[error("unsupported: unknown must-understand bits {bits:#x}: upgrade the worker")]
    Flags {
        /// The unknown bits.
        bits: u32,
    },
    /// A kind that this build does not know.
    #[error("unsupported: unknown record kind {found}: upgrade the worker")]
    Kind {
        /// Code of the kind.
        found: u16,
    },
    /// A mode that does not go with the kind.
    #[error("unsupported: mode {found} does not go with this kind of record")]
    Mode {
        /// Code of the mode.
        found: u32,
    },
    /// Counts and length disagree.
    #[error("{what}: found {found}, expected {expected}: counts and length of the record disagree")]
    Counts {
        /// The count.
        what: &'static str,
        /// Its value.
        found: u64,
        /// What the rest of the record says.
        expected: u64,
    },
    /// A row whose pairs or valid count lie outside the record's pairs.
    #[error("row {row}: {what}: found {found}, expected at most {expected}")]
    RowCounts {
        /// The row.
        row: u32,
        /// The count.
        what: &'static str,
        /// Its value.
        found: u64,
        /// Its limit.
        expected: u64,
    },
    /// A request id that is too long.
    #[error("request id of {found} bytes, expected at most {expected}")]
    RequestBytes {
        /// Length found.
        found: u64,
        /// Longest length.
        expected: u64,
    },
    /// A row of a layer that the geometry does not have.
    #[error("row {row}: layer {layer} is unknown: the geometry has {layers} layers")]
    Layer {
        /// The row.
        row: u32,
        /// The layer.
        layer: u32,
        /// Number of layers.
        layers: u32,
    },
    /// A row of a group that the geometry does not have, or not for this layer.
    #[error("row {row}: group: found {found}, expected {expected}")]
    Group {
        /// The row.
        row: u32,
        /// Group of the row.
        found: u32,
        /// Group of the layer, or number of groups for a row of all layers.
        expected: u32,
    },
    /// Two rows that fill one tensor (one layer twice, or two layers that alias).
    #[error("row {row}: layer {layer} fills a tensor that an earlier row of this plan fills: keep one of the rows")]
    TensorTwice {
        /// The row.
        row: u32,
        /// The layer.
        layer: u32,
    },
    /// A source kind that is unknown or that was not negotiated.
    #[error("row {row}: source kind {found} is not one that was negotiated")]
    SourceKind {
        /// The row.
        row: u32,
        /// Code of the source kind.
        found: u16,
    },
    /// A source id out of its range.
    #[error("row {row}: source {id} is outside [{from}, {to})")]
    SourceRange {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
        /// First id of the range.
        from: u32,
        /// End of the range.
        to: u32,
    },
    /// A destination id out of its range.
    #[error("row {row}: destination {id} is outside [0, {to})")]
    DestinationRange {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
        /// End of the range.
        to: u32,
    },
    /// The null block of a pool.
    #[error("row {row}: {id} is the null block of its pool")]
    NullBlock {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
    },
    /// One destination twice in a row.
    #[error("row {row}: destination {id} appears twice")]
    DuplicateDestination {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
    },
    /// A destination that an operation in flight reads or writes.
    #[error("row {row}: destination {id} is leased by an operation in flight: wait for its completion")]
    DestinationInFlight {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
    },
    /// A source that an operation in flight writes.
    #[error("row {row}: source {id} is written by an operation in flight: wait for its completion")]
    SourceInFlight {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
    },
    /// A source that is not pinned on every rank yet (X31).
    #[error("row {row}: source {id} is not pinned yet: all ranks have registered the first {ready} blocks")]
    NotPinned {
        /// The row.
        row: u32,
        /// The id.
        id: u32,
        /// Blocks that are registered on every rank.
        ready: u32,
    },
    /// A record for another generation of the device pools (X24a).
    #[error("stale generation: found {found}, expected {expected}: plan again after the Reset")]
    StaleGeneration {
        /// Generation of the record.
        found: u64,
        /// Generation of the pools.
        expected: u64,
    },
    /// A Retain or Keep that does not follow from the request's state on this rank.
    #[error("row {row}: slot {slot} does not hold block {found}: the tables of the sides differ, Reset")]
    Table {
        /// The row.
        row: u32,
        /// The slot.
        slot: u32,
        /// The block that the plan names.
        found: u32,
    },
    /// A staging range of a WriteBack outside the rank's write-back area.
    #[error("write-back slots [{from}, {to}) are outside [0, {slots})")]
    WriteBackRange {
        /// First slot.
        from: u64,
        /// End of the range.
        to: u64,
        /// Slots of the area.
        slots: u64,
    },
    /// A rank that has no room for another request's tables.
    #[error("{found} requests have tables, the most is {most}: finish requests first, or raise the limit on all ranks")]
    Requests {
        /// Requests with tables.
        found: u32,
        /// Most requests.
        most: u32,
    },
    /// Moves that cannot be ordered, or a table that cannot be built.
    #[error("row {row}: the table or the moves of this row contradict each other or the geometry")]
    Rows {
        /// The row.
        row: u32,
    },
    /// A record that this rank cannot place in its request's history.
    #[error("request epoch or revision: found {found}, expected {expected}: the request is unknown or has moved on")]
    Revision {
        /// Value of the record.
        found: u64,
        /// Value of the rank.
        expected: u64,
    },
}

impl Refusal {
    /// The number that a terminal slot carries. Never reused for another meaning.
    pub const fn code(&self) -> u16 {
        match self {
            Self::Checksum { .. } => 1,
            Self::Version { .. } => 2,
            Self::Flags { .. } => 3,
            Self::Kind { .. } => 4,
            Self::Mode { .. } => 5,
            Self::Counts { .. } => 6,
            Self::RowCounts { .. } => 7,
            Self::RequestBytes { .. } => 8,
            Self::Layer { .. } => 9,
            Self::Group { .. } => 10,
            Self::TensorTwice { .. } => 11,
            Self::SourceKind { .. } => 12,
            Self::SourceRange { .. } => 13,
            Self::DestinationRange { .. } => 14,
            Self::NullBlock { .. } => 15,
            Self::DuplicateDestination { .. } => 16,
            Self::DestinationInFlight { .. } => 17,
            Self::SourceInFlight { .. } => 18,
            Self::NotPinned { .. } => 19,
            Self::StaleGeneration { .. } => 20,
            Self::Table { .. } => 21,
            Self::WriteBackRange { .. } => 22,
            Self::Revision { .. } => 23,
            Self::Requests { .. } => 24,
            Self::Rows { .. } => 25,
        }
    }

    /// The row that the refusal names, `u32::MAX` where it names none.
    pub const fn row(&self) -> u32 {
        match self {
            Self::RowCounts { row, .. }
            | Self::Layer { row, .. }
            | Self::Group { row, .. }
            | Self::TensorTwice { row, .. }
            | Self::SourceKind { row, .. }
            | Self::SourceRange { row, .. }
            | Self::DestinationRange { row, .. }
            | Self::NullBlock { row, .. }
            | Self::DuplicateDestination { row, .. }
            | Self::DestinationInFlight { row, .. }
            | Self::SourceInFlight { row, .. }
            | Self::NotPinned { row, .. }
            | Self::Table { row, .. }
            | Self::Rows { row } => *row,
            _ => u32::MAX,
        }
    }
}

/// What the code in a terminal slot stands for, in a word or two. The values are in the worker's log.
pub const fn reason(code: u16) -> &'static str {
    match code {
        0 => "none",
        1 => "checksum",
        2 => "record version",
        3 => "unsupported flags",
        4 => "unsupported kind",
        5 => "unsupported mode",
        6 => "counts disagree",
        7 => "row counts disagree",
        8 => "request id too long",
        9 => "unknown layer",
        10 => "wrong group",
        11 => "tensor filled twice",
        12 => "source kind",
        13 => "source out of range",
        14 => "destination out of range",
        15 => "null block",
        16 => "duplicate destination",
        17 => "destination in flight",
        18 => "source in flight",
        19 => "not pinned",
        20 => "stale generation",
        21 => "tables differ",
        22 => "write-back range",
        23 => "stale revision",
        24 => "too many requests",
        25 => "contradicting rows",
        _ => "unknown reason",
    }
}
