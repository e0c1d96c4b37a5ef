//! The bytes of a ring record (X5, X6) and of a terminal slot (X12).
//!
//! A record is whole 64-byte lines: a 128-byte header, the request id padded to 8 bytes, the rows, the id pairs (ragged,
//! one run of pairs per row), and, where flagged, one content tag per pair. A padding record is one or more lines of
//! which only the first means anything.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of one ring line: the unit of positions and of terminal slots.
pub const LINE_BYTES: usize = 64;
/// Words of one ring line.
pub const LINE_WORDS: usize = LINE_BYTES / 8;
/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 128;
/// Longest request id in bytes (X5).
pub const MAX_REQUEST_BYTES: usize = 256;
/// Version of the record format, major in the high byte. The major version is the segment's (X3, X4).
pub const RECORD_VERSION: u16 = 0x0100;
/// Layer of a row that speaks for every layer of its group (a shared table).
pub const ALL_LAYERS: u32 = u32::MAX;
/// Slot of a retained block that was not resident before: it comes from the upload just committed.
pub const NEW_SLOT: u32 = u32::MAX;

/// May-ignore flag: one content tag per id pair follows the pairs.
pub const FLAG_TAGS: u32 = 1;
/// May-ignore flags that this version knows.
pub const KNOWN_MAY_IGNORE: u32 = FLAG_TAGS;
/// Must-understand flag: the request ends with this record; its tables are dropped.
pub const FLAG_FINAL: u32 = 1;
/// Must-understand flags that this version knows. An unknown one is refused (X4).
pub const KNOWN_MUST_UNDERSTAND: u32 = FLAG_FINAL;

/// What a record asks of a worker (X6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u16)]
pub enum Kind {
    /// Fills the ring up to its end; answered like every record, so that it needs no rule of its own.
    Padding = 1,
    /// Host to device.
    Upload = 2,
    /// Zero delta: revisions advance, nothing moves (R42).
    Keep = 3,
    /// New tables for a request (R51–R57).
    Retain = 4,
    /// Device to the rank's write-back area.
    WriteBack = 5,
    /// Ends the operation whose position is the header's `target` (X15).
    Abort = 6,
    /// Barrier: empties the device and sets the pool generation (X24a).
    Reset = 7,
}

impl Kind {
    /// The kind of a record, or `None` where this version does not know it.
    pub const fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Padding,
            2 => Self::Upload,
            3 => Self::Keep,
            4 => Self::Retain,
            5 => Self::WriteBack,
            6 => Self::Abort,
            7 => Self::Reset,
            _ => return None,
        })
    }

    /// Kinds that may use the ring's reserve and pass while a rank is missing (X10, X24).
    pub const fn is_control(self) -> bool {
        matches!(self, Self::Abort | Self::Reset)
    }
}

/// How a Retain changes the tables (R53), in the header's `mode`. Zero for other kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u32)]
pub enum RetainMode {
    /// One table for all layers of a group: rows of [`ALL_LAYERS`], pairs (old slot, physical block).
    SharedTable = 1,
    /// One table per layer: pairs (old slot, physical block).
    LayerTables = 2,
    /// Blocks move inside the device: pairs (physical block read, physical block written).
    ByteMove = 3,
}

impl RetainMode {
    /// The mode of a Retain, or `None` where this version does not know it.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::SharedTable,
            2 => Self::LayerTables,
            3 => Self::ByteMove,
            _ => return None,
        })
    }
}

/// Where an upload's source ids point (X6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u16)]
pub enum SourceKind {
    /// Pool blocks, in place.
    SourceOnly = 1,
    /// Blocks that the producer gathered into the gather region [K, N) first.
    Copy = 2,
}

impl SourceKind {
    /// The source kind of a row, or `None` where this version does not know it.
    pub const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::SourceOnly),
            2 => Some(Self::Copy),
            _ => None,
        }
    }
}

/// First 128 bytes of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecordHeader {
    /// Position + 1: the commit word (X10).
    pub commit: u64,
    /// [`checksum`](crate::checksum::checksum) of the record.
    pub checksum: u64,
    /// Bytes of the record, a multiple of 64.
    pub length_bytes: u32,
    /// [`Kind`].
    pub kind: u16,
    /// [`RECORD_VERSION`] of the writer.
    pub version: u16,
    /// Flags that a reader must know to answer anything but Rejected.
    pub must_understand: u32,
    /// Flags that a reader may ignore.
    pub may_ignore: u32,
    /// Process epoch of the producer that wrote the record.
    pub producer_epoch: u64,
    /// Epoch of the request.
    pub request_epoch: u64,
    /// Operation of the request epoch.
    pub operation_id: u64,
    /// Generation of the device pools that the record is for; for a Reset, the new one.
    pub pool_generation: u64,
    /// Map revision g that the operation leads to.
    pub map_revision: u64,
    /// Selection revision r that the operation leads to.
    pub selection_revision: u64,
    /// Abort: position of the operation to end. WriteBack: first staging slot. Else 0.
    pub target: u64,
    /// Number of rows.
    pub row_count: u32,
    /// Number of id pairs over all rows.
    pub pair_count: u32,
    /// Bytes of the request id.
    pub request_bytes: u32,
    /// [`RetainMode`] of a Retain, else 0.
    pub mode: u32,
    /// Zero.
    pub reserved: [u64; 3],
}

/// One row: one layer of one group (X5, R24).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RowRecord {
    /// Decoder layer, or [`ALL_LAYERS`].
    pub layer: u32,
    /// Group of the layer.
    pub group: u32,
    /// [`SourceKind`] of an upload, else 0.
    pub source_kind: u16,
    /// Zero.
    pub flags: u16,
    /// Pairs that count; later ones of the row are ignored (R24).
    pub valid: u32,
    /// Index of the row's first pair among the record's pairs.
    pub pairs_at: u32,
    /// Pairs of the row.
    pub pairs: u32,
    /// Tokens that are valid in the row's table after a Retain, else 0.
    pub valid_tokens: u32,
    /// Zero.
    pub reserved: u32,
}

/// A source id and a destination id. What they name depends on the kind; see [`RetainMode`] and [`Kind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Pair {
    /// Upload: source block. WriteBack: physical block. Retain: old slot, or physical block for a byte move.
    pub source: u32,
    /// Upload and Retain: physical block. WriteBack: pool block that takes the bytes once verified.
    pub destination: u32,
}

/// How an operation ended on one rank (X12). The order is from best to worst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum Terminal {
    /// A device event proved that all reads ended and all writes are visible (X13).
    Done = 1,
    /// Ended by an Abort; destinations are undefined where copies had been submitted (X15).
    Superseded = 2,
    /// Refused before any copy (X9).
    Rejected = 3,
    /// The device failed.
    Failed = 4,
    /// The rank died or left; only the producer decides this (X24).
    RankLost = 5,
}

impl Terminal {
    /// The terminal of a slot, or `None` where a worker may not write it.
    pub const fn from_slot(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Done,
            2 => Self::Superseded,
            3 => Self::Rejected,
            4 => Self::Failed,
            _ => return None,
        })
    }
}

/// The 64 bytes in which a rank answers one record (X12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TerminalSlot {
    /// Position + 1 of the record that is answered: the commit word.
    pub commit: u64,
    /// Checksum of the record that is answered: its whole identity in one word.
    pub identity: u64,
    /// Producer epoch of the record.
    pub producer_epoch: u64,
    /// Process epoch of the worker.
    pub worker_epoch: u64,
    /// [`Terminal`].
    pub status: u8,
    /// 1 where some copies of a Superseded operation had been submitted.
    pub partial: u8,
    /// [`crate::refusal::Refusal::code`] of a Rejected operation, else 0.
    pub reason: u16,
    /// Row that the reason names, or `u32::MAX`.
    pub row: u32,
    /// Bytes that this rank moved for the operation.
    pub bytes_moved: u64,
    /// Nanoseconds from the first submit to the event, by the rank's clock.
    pub device_ns: u64,
    /// Digest of the request's device state after the operation; equal on all ranks (I9).
    pub digest: u64,
}

/// Bytes of a record with these counts, in whole lines. `None` on overflow of the length field.
pub fn record_bytes(request_bytes: usize, rows: usize, pairs: usize, tags: bool) -> Option<usize> {
    let per_pair = size_of::<Pair>() + if tags { 8 } else { 0 };
    let bytes = HEADER_BYTES
        .checked_add(request_bytes.checked_next_multiple_of(8)?)?
        .checked_add(rows.checked_mul(size_of::<RowRecord>())?)?
        .checked_add(pairs.checked_mul(per_pair)?)?
        .checked_next_multiple_of(LINE_BYTES)?;
    u32::try_from(bytes).ok().map(|_| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x3_sizes_of_the_shared_structs_are_fixed() {
        assert_eq!(size_of::<RecordHeader>(), HEADER_BYTES);
        assert_eq!(size_of::<RowRecord>(), 32);
        assert_eq!(size_of::<Pair>(), 8);
        assert_eq!(size_of::<TerminalSlot>(), LINE_BYTES);
    }

    #[test]
    fn x12_the_worst_of_the_ranks_is_the_greatest_terminal() {
        let worst = [Terminal::Done, Terminal::Failed, Terminal::Superseded]
            .into_iter()
            .max();
        assert_eq!(worst, Some(Terminal::Failed));
        assert!(Terminal::RankLost > Terminal::Failed && Terminal::Rejected > Terminal::Superseded);
    }

    #[test]
    fn x12_a_worker_cannot_write_rank_lost() {
        assert_eq!(Terminal::from_slot(Terminal::RankLost as u8), None);
    }

    #[test]
    fn x10_an_absurd_count_is_no_length() {
        assert_eq!(record_bytes(0, usize::MAX / 8, 0, false), None);
        assert_eq!(record_bytes(0, 0, (u32::MAX / 8) as usize + 1, false), None);
        assert_eq!(record_bytes(8, 1, 1, false), Some(192));
    }
}
