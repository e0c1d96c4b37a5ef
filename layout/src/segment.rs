//! The first 128 bytes of every segment: what it is, who made it, and whether it is whole (X3).

use core::fmt;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ids::{ChannelId, ProcessEpoch, Rank};

/// Bytes that the header takes at the start of a segment: two cache lines.
pub const HEADER_BYTES: usize = 128;

/// Where the ready word lies: the last word of the header, and the last one that its creator stores.
pub const READY_AT: usize = 120;

/// The first eight bytes of every segment.
pub const MAGIC: [u8; 8] = *b"KVSLUICE";

/// What the ready word holds once everything before it is in place.
pub const READY: u64 = u64::from_le_bytes(*b"ready..\n");

/// Major version of the layout: another one is refused (X3).
pub const LAYOUT_MAJOR: u32 = 1;

/// Minor version of the layout: only ever adds, so another one is accepted (X4).
pub const LAYOUT_MINOR: u32 = 0;

/// What a segment holds, and so who writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SegmentKind {
    /// Written by the producer: capability, membership, plan ring, block directory.
    Control,
    /// Written by one rank: its positions, terminal slots and write-back area.
    Rank(Rank),
    /// Written by the producer: the KV blocks.
    Pool,
}

impl SegmentKind {
    /// The kind as it stands in the header: (kind, rank), with rank 0 where there is none.
    const fn code(self) -> (u32, u32) {
        match self {
            Self::Control => (1, 0),
            Self::Rank(rank) => (2, rank.get()),
            Self::Pool => (3, 0),
        }
    }
}

impl fmt::Display for SegmentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Control => f.write_str("control"),
            Self::Rank(rank) => write!(f, "rank-{rank}"),
            Self::Pool => f.write_str("pool"),
        }
    }
}

/// The header as it lies in memory, little-endian, without padding.
///
/// It is read as a private copy: no reference to the shared bytes is ever made (X2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SegmentHeader {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`LAYOUT_MAJOR`] of the creator.
    pub major: U32,
    /// [`LAYOUT_MINOR`] of the creator.
    pub minor: U32,
    /// Size of the whole segment in bytes.
    pub size_bytes: U64,
    /// Hash of sizes, offsets and meanings of the major version's base fields.
    pub layout_hash: U64,
    /// Boot of the kernel that the segment was made under.
    pub boot_id: [u8; 16],
    /// The channel it belongs to.
    pub channel: U64,
    /// The process start that made it (X22).
    pub creator_epoch: U64,
    /// 1 control, 2 rank, 3 pool.
    pub kind: U32,
    /// The rank, for a rank segment; else 0.
    pub rank: U32,
    /// Zero; for later minor versions.
    pub reserved: [U64; 6],
    /// [`READY`] once the segment is whole.
    pub ready: U64,
}

const _: () = assert!(size_of::<SegmentHeader>() == HEADER_BYTES);
const _: () = assert!(core::mem::offset_of!(SegmentHeader, ready) == READY_AT);

/// What a reader of a segment knows about it beforehand. `None` is "whatever it says".
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The role that the segment was handed over for.
    pub kind: SegmentKind,
    /// Size of the descriptor, from `fstat`.
    pub size_bytes: u64,
    /// The reader's own layout hash.
    pub layout_hash: u64,
    /// The running kernel's boot id.
    pub boot_id: [u8; 16],
    /// The channel that the reader attaches to.
    pub channel: Option<ChannelId>,
    /// The process start that must have made it.
    pub creator_epoch: Option<ProcessEpoch>,
}

/// A segment that cannot be used, with the field of its header or of its descriptor that says so (X3, X3a).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{segment} segment refused: {field} is {found}, expected {expected}; {remedy}")]
pub struct SegmentRefused {
    /// The segment that was looked at.
    pub segment: SegmentKind,
    /// The field of the header or of the descriptor.
    pub field: &'static str,
    /// What it has there.
    pub found: String,
    /// What a usable segment has there.
    pub expected: String,
    /// What to do about it.
    pub remedy: &'static str,
}

impl SegmentHeader {
    /// A header for a new segment, not ready yet: the creator stores [`READY`] last.
    pub fn new(
        kind: SegmentKind,
        size_bytes: u64,
        layout_hash: u64,
        boot_id: [u8; 16],
        channel: ChannelId,
        creator_epoch: ProcessEpoch,
    ) -> Self {
        let (kind, rank) = kind.code();
        Self {
            magic: MAGIC,
            major: LAYOUT_MAJOR.into(),
            minor: LAYOUT_MINOR.into(),
            size_bytes: size_bytes.into(),
            layout_hash: layout_hash.into(),
            boot_id,
            channel: channel.get().into(),
            creator_epoch: creator_epoch.get().into(),
            kind: kind.into(),
            rank: rank.into(),
            reserved: [U64::ZERO; 6],
            ready: U64::ZERO,
        }
    }

    /// The header from a private copy of a segment's first words.
    pub fn from_words(words: &[u64; HEADER_BYTES / 8]) -> Self {
        zerocopy::transmute!(words.map(U64::new))
    }

    /// The header as words, ready to be stored one by one.
    pub fn to_words(&self) -> [u64; HEADER_BYTES / 8] {
        let words: [U64; HEADER_BYTES / 8] = zerocopy::transmute!(*self);
        words.map(U64::get)
    }

    /// Checks every field against what the reader knows. Another minor version is fine (X4).
    ///
    /// # Errors
    /// [`SegmentRefused`] for the first field that does not fit: size of the descriptor, magic, major version, layout
    /// hash, ready word, then the segment's identity.
    pub fn check(&self, expected: &Expected) -> Result<(), SegmentRefused> {
        let refuse = |field, found: String, wanted: String, remedy| {
            Err(SegmentRefused {
                segment: expected.kind,
                field,
                found,
                expected: wanted,
                remedy,
            })
        };
        let differs = |field, found: u64, wanted: u64, remedy| {
            if found == wanted {
                return Ok(());
            }
            refuse(field, found.to_string(), wanted.to_string(), remedy)
        };
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        const SAME_BUILD: &str = "run the same kvsluice release on both sides";
        const START_AGAIN: &str = "stop both sides, run `kvsluice clean` and start again";

        // X3: a short segment first, since its other fields may not even be its own.
        if expected.size_bytes < HEADER_BYTES as u64 {
            let wanted = format!("at least {HEADER_BYTES} bytes");
            return refuse("size", format!("{} bytes", expected.size_bytes), wanted, START_AGAIN);
        }
        if self.magic != MAGIC {
            return refuse("magic", hex(&self.magic), hex(&MAGIC), "this is no kvsluice segment");
        }
        differs(
            "layout major version",
            self.major.get().into(),
            LAYOUT_MAJOR.into(),
            SAME_BUILD,
        )?;
        if self.layout_hash.get() != expected.layout_hash {
            let found = format!("{:016x}", self.layout_hash.get());
            return refuse(
                "layout hash",
                found,
                format!("{:016x}", expected.layout_hash),
                SAME_BUILD,
            );
        }
        if self.ready.get() != READY {
            let found = format!("{:016x}", self.ready.get());
            return refuse(
                "ready word",
                found,
                format!("{READY:016x}"),
                "its creator died or is still at work; retry",
            );
        }
        differs("total size", self.size_bytes.get(), expected.size_bytes, START_AGAIN)?;
        if self.boot_id != expected.boot_id {
            return refuse(
                "boot id",
                hex(&self.boot_id),
                hex(&expected.boot_id),
                "the machine was rebooted since; it starts cold",
            );
        }
        let (kind, rank) = expected.kind.code();
        differs("segment kind", self.kind.get().into(), kind.into(), START_AGAIN)?;
        differs("rank", self.rank.get().into(), rank.into(), START_AGAIN)?;
        if let Some(channel) = expected.channel {
            differs("channel id", self.channel.get(), channel.get(), START_AGAIN)?;
        }
        if let Some(epoch) = expected.creator_epoch {
            differs("creator epoch", self.creator_epoch.get(), epoch.get(), START_AGAIN)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SegmentHeader {
        let boot = core::array::from_fn(|i| i as u8);
        let mut header = SegmentHeader::new(
            SegmentKind::Rank(Rank(5)),
            0x2000,
            0xfeed,
            boot,
            ChannelId(0xabc),
            ProcessEpoch(0xdef),
        );
        header.ready = READY.into();
        header
    }

    fn expected() -> Expected {
        Expected {
            kind: SegmentKind::Rank(Rank(5)),
            size_bytes: 0x2000,
            layout_hash: 0xfeed,
            boot_id: core::array::from_fn(|i| i as u8),
            channel: Some(ChannelId(0xabc)),
            creator_epoch: Some(ProcessEpoch(0xdef)),
        }
    }

    #[test]
    fn x3_the_header_bytes_are_golden() {
        #[rustfmt::skip]
        let golden: [u8; HEADER_BYTES] = [
            b'K', b'V', b'S', b'L', b'U', b'I', b'C', b'E',  1, 0, 0, 0,  0, 0, 0, 0,
            0, 0x20, 0, 0, 0, 0, 0, 0,                       0xed, 0xfe, 0, 0, 0, 0, 0, 0,
            0, 1, 2, 3, 4, 5, 6, 7,                          8, 9, 10, 11, 12, 13, 14, 15,
            0xbc, 0x0a, 0, 0, 0, 0, 0, 0,                    0xef, 0x0d, 0, 0, 0, 0, 0, 0,
            2, 0, 0, 0,  5, 0, 0, 0,                         0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0,                          0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0,                          0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0,                          b'r', b'e', b'a', b'd', b'y', b'.', b'.', b'\n',
        ];
        assert_eq!(header().as_bytes(), golden);
        assert_eq!(SegmentHeader::from_words(&header().to_words()), header());
        assert_eq!(header().to_words()[READY_AT / 8], READY);
        assert_eq!(header().check(&expected()), Ok(()));
    }

    #[test]
    fn x3_a_refusal_names_the_field_what_was_found_and_what_was_expected() {
        type Spoil = fn(&mut SegmentHeader, &mut Expected);
        let cases: [(Spoil, &str); 10] = [
            (
                |_, e| e.size_bytes = 64,
                "size is 64 bytes, expected at least 128 bytes",
            ),
            (|h, _| h.magic[0] = b'X', "magic is 585653"),
            (|h, _| h.major = 2.into(), "layout major version is 2, expected 1"),
            (
                |h, _| h.layout_hash = 7.into(),
                "layout hash is 0000000000000007, expected 000000000000feed",
            ),
            (
                |h, _| h.ready = 0.into(),
                "ready word is 0000000000000000, expected 0a2e2e7964616572",
            ),
            (|h, _| h.size_bytes = 4096.into(), "total size is 4096, expected 8192"),
            (|h, _| h.boot_id[0] = 9, "boot id is 09010203"),
            (|h, _| h.kind = 3.into(), "segment kind is 3, expected 2"),
            (|h, _| h.rank = 4.into(), "rank is 4, expected 5"),
            (|h, _| h.channel = 1.into(), "channel id is 1, expected 2748"),
        ];
        for (spoil, message) in cases {
            let (mut header, mut expected) = (header(), expected());
            spoil(&mut header, &mut expected);
            let said = header.check(&expected).unwrap_err().to_string();
            assert!(said.starts_with("rank-5 segment refused: "), "{said}");
            assert!(said.contains(message), "{said:?} does not say {message:?}");
        }
    }

    #[test]
    fn x4_another_minor_version_is_accepted() {
        let mut later = header();
        later.minor = 7.into();
        later.reserved[0] = 99.into();
        assert_eq!(later.check(&expected()), Ok(()));
    }
}
