//! Plans: built by the producer ([`PlanDraft`]), read by a worker ([`Plan`]).
//!
//! A draft owns its rows and is encoded once, into the place it is published from; clearing it keeps its memory, so a
//! reused draft allocates nothing. A [`Plan`] is a view of a *private copy* of a record: it is parsed once and every
//! later use is of the parsed copy (X2).

use zerocopy::{FromBytes, IntoBytes};

use crate::checksum::checksum;
use crate::ids::{
    DecoderLayer, DestinationBlock, GroupId, MapRevision, OperationId, PoolGeneration, Position, ProcessEpoch,
    RequestEpoch, SelectionRevision, SourceBlock,
};
use crate::lease::Rows;
use crate::planted::planted;
use crate::record::{
    ALL_LAYERS, FLAG_FINAL, FLAG_TAGS, HEADER_BYTES, KNOWN_MUST_UNDERSTAND, Kind, LINE_BYTES, MAX_REQUEST_BYTES, Pair,
    RECORD_VERSION, RecordHeader, RetainMode, RowRecord, SourceKind, record_bytes,
};
use crate::refusal::Refusal;

/// Who a plan belongs to and what it leads to: the identity of an operation (R45) with the request's opaque id (R49).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Operation {
    /// Epoch of the request.
    pub request_epoch: RequestEpoch,
    /// Operation of the request epoch.
    pub operation_id: OperationId,
    /// Generation of the device pools.
    pub pool_generation: PoolGeneration,
    /// Map revision g that the operation leads to.
    pub map_revision: MapRevision,
    /// Selection revision r that the operation leads to.
    pub selection_revision: SelectionRevision,
}

/// A plan that is being built. Rows keep the order in which they were added; ids past a row's valid count are carried
/// and ignored (R24). Equal inputs give equal bytes (R23).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanDraft {
    kind: Kind,
    mode: u32,
    must_understand: u32,
    target: u64,
    operation: Operation,
    request: Vec<u8>,
    rows: Vec<RowRecord>,
    pairs: Vec<Pair>,
    tags: Vec<u64>,
}

impl Default for PlanDraft {
    fn default() -> Self {
        Self::new()
    }
}

impl PlanDraft {
    /// An empty draft; begin it with one of [`upload`](Self::upload), [`keep`](Self::keep), [`retain`](Self::retain),
    /// [`write_back`](Self::write_back), [`abort`](Self::abort), [`reset`](Self::reset).
    pub fn new() -> Self {
        Self {
            kind: Kind::Keep,
            mode: 0,
            must_understand: 0,
            target: 0,
            operation: Operation::default(),
            request: Vec::new(),
            rows: Vec::new(),
            pairs: Vec::new(),
            tags: Vec::new(),
        }
    }

    fn begin(&mut self, kind: Kind, request: &[u8], operation: Operation) -> &mut Self {
        self.kind = kind;
        self.mode = 0;
        self.operation = operation;
        self.request.clear();
        self.request.extend_from_slice(request);
        self.rows.clear();
        self.pairs.clear();
        // R23: nothing of what the draft was used for before.
        if !planted("r23_a_draft_keeps_what_it_had") {
            self.must_understand = 0;
            self.target = 0;
        }
        self.tags.clear();
        self
    }

    /// Begins an upload (H2D) for `request`.
    pub fn upload(&mut self, request: &[u8], operation: Operation) -> &mut Self {
        self.begin(Kind::Upload, request, operation)
    }

    /// Begins a zero delta: revisions advance, nothing moves (R42).
    pub fn keep(&mut self, request: &[u8], operation: Operation) -> &mut Self {
        self.begin(Kind::Keep, request, operation)
    }

    /// Begins a change of tables.
    pub fn retain(&mut self, request: &[u8], operation: Operation, mode: RetainMode) -> &mut Self {
        self.begin(Kind::Retain, request, operation).mode = mode as u32;
        self
    }

    /// Begins a write-back (D2H) whose blocks, in pair order, take the staging slots from `first_slot`.
    pub fn write_back(&mut self, request: &[u8], operation: Operation, first_slot: u64) -> &mut Self {
        self.begin(Kind::WriteBack, request, operation).target = first_slot;
        self
    }

    /// Begins an abort of the operation at `position` (X15).
    pub fn abort(&mut self, request: &[u8], operation: Operation, position: Position) -> &mut Self {
        self.begin(Kind::Abort, request, operation).target = position.0;
        self
    }

    /// Begins a Reset to `generation` (X24a).
    pub fn reset(&mut self, generation: PoolGeneration) -> &mut Self {
        self.begin(
            Kind::Reset,
            b"",
            Operation {
                pool_generation: generation,
                ..Operation::default()
            },
        )
    }

    /// Marks the plan as the request's last: its tables are dropped once it is applied.
    pub fn last_of_request(&mut self) -> &mut Self {
        self.must_understand |= FLAG_FINAL;
        self
    }

    /// Adds a row of (source block, physical block) for one layer, all of it valid.
    pub fn row(
        &mut self,
        layer: DecoderLayer,
        group: GroupId,
        source_kind: SourceKind,
        pairs: impl IntoIterator<Item = (SourceBlock, DestinationBlock)>,
    ) -> &mut Self {
        let pairs = pairs.into_iter().map(|(s, d)| Pair {
            source: s.0,
            destination: d.0,
        });
        self.raw_row(layer.0, group.0, source_kind as u16, 0, pairs)
    }

    /// Adds a row of a Retain: (old slot or [`crate::record::NEW_SLOT`], physical block) or, for a byte move, (physical
    /// block read, physical block written). `layer` is `None` for a table shared by the group's layers.
    pub fn table_row(
        &mut self,
        layer: Option<DecoderLayer>,
        group: GroupId,
        valid_tokens: u32,
        pairs: impl IntoIterator<Item = Pair>,
    ) -> &mut Self {
        self.raw_row(layer.map_or(ALL_LAYERS, |l| l.0), group.0, 0, valid_tokens, pairs)
    }

    /// Adds a row as it is: the way in for a WriteBack, and for tests of the checks behind it.
    pub fn raw_row(
        &mut self,
        layer: u32,
        group: u32,
        source_kind: u16,
        valid_tokens: u32,
        pairs: impl IntoIterator<Item = Pair>,
    ) -> &mut Self {
        let pairs_at = self.pairs.len();
        self.pairs.extend(pairs);
        let pairs = (self.pairs.len() - pairs_at) as u32;
        self.rows.push(RowRecord {
            layer,
            group,
            source_kind,
            flags: 0,
            valid: pairs,
            pairs_at: pairs_at as u32,
            pairs,
            valid_tokens,
            reserved: 0,
        });
        self
    }

    /// Lowers the valid count of the last row: the pairs behind it are carried and ignored (R24).
    pub fn valid(&mut self, valid: u32) -> &mut Self {
        if let Some(row) = self.rows.last_mut() {
            row.valid = valid;
        }
        self
    }

    /// Adds the content tags of the pairs added so far, one each: what the source holds by the producer's account. A
    /// worker that verifies compares the destination with it.
    pub fn tags(&mut self, tags: impl IntoIterator<Item = u64>) -> &mut Self {
        self.tags.extend(tags);
        self
    }

    /// Sets a must-understand bit: how a test speaks for a future version (X4).
    pub fn must_understand(&mut self, bits: u32) -> &mut Self {
        self.must_understand |= bits;
        self
    }

    /// Kind of the plan.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The rows, for the checks of [`LeaseTable`](crate::lease::LeaseTable).
    pub fn lease_rows(&self) -> Rows<'_> {
        Rows {
            kind: self.kind,
            mode: RetainMode::from_code(self.mode),
            rows: &self.rows,
            pairs: &self.pairs,
        }
    }

    /// What the plan leads to.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The opaque request id.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// The header's target: see [`RecordHeader::target`].
    pub fn target(&self) -> u64 {
        self.target
    }

    /// Bytes of the encoded record, in whole lines. `None` where they exceed the length field.
    pub fn encoded_bytes(&self) -> Option<usize> {
        record_bytes(
            self.request.len(),
            self.rows.len(),
            self.pairs.len(),
            !self.tags.is_empty(),
        )
    }

    /// Encodes the record for `position` into `into`, which is exactly [`encoded_bytes`](Self::encoded_bytes) long.
    ///
    /// # Errors
    /// [`Refusal::RequestBytes`] for a request id that is too long, [`Refusal::Counts`] where the tags are not one per
    /// pair or `into` has another length.
    pub fn encode(&self, epoch: ProcessEpoch, position: Position, into: &mut [u64]) -> Result<(), Refusal> {
        if self.request.len() > MAX_REQUEST_BYTES {
            return Err(Refusal::RequestBytes {
                found: self.request.len() as u64,
                expected: MAX_REQUEST_BYTES as u64,
            });
        }
        let counts = |what, found: usize, expected: usize| Refusal::Counts {
            what,
            found: found as u64,
            expected: expected as u64,
        };
        if !self.tags.is_empty() && self.tags.len() != self.pairs.len() {
            return Err(counts("tags", self.tags.len(), self.pairs.len()));
        }
        let bytes = self
            .encoded_bytes()
            .ok_or_else(|| counts("record bytes", usize::MAX, u32::MAX as usize))?;
        if into.len() * 8 != bytes {
            return Err(counts("record bytes", into.len() * 8, bytes));
        }
        // Whole words, each stored once: what is written in smaller parts and summed up right after stalls the sum.
        let flags = if self.tags.is_empty() { 0 } else { FLAG_TAGS };
        let header: [u64; HEADER_BYTES / 8] = [
            position.0 + 1,
            0,
            word(
                bytes as u32,
                u32::from(self.kind as u16) | u32::from(RECORD_VERSION) << 16,
            ),
            word(self.must_understand, flags),
            epoch.0,
            self.operation.request_epoch.0,
            self.operation.operation_id.0,
            self.operation.pool_generation.0,
            self.operation.map_revision.0,
            self.operation.selection_revision.0,
            self.target,
            word(self.rows.len() as u32, self.pairs.len() as u32),
            word(self.request.len() as u32, self.mode),
            0,
            0,
            0,
        ];
        let rest = put(into, header.into_iter());
        let rest = put(rest, self.request.chunks(8).map(padded_word));
        let (rows, rest) = rest.split_at_mut_checked(4 * self.rows.len()).unwrap_or_default();
        for (words, row) in rows.chunks_exact_mut(4).zip(&self.rows) {
            words.copy_from_slice(&[
                word(row.layer, row.group),
                word(u32::from(row.source_kind) | u32::from(row.flags) << 16, row.valid),
                word(row.pairs_at, row.pairs),
                word(row.valid_tokens, row.reserved),
            ]);
        }
        let rest = put(rest, self.pairs.iter().map(|pair| word(pair.source, pair.destination)));
        let rest = put(rest, self.tags.iter().copied());
        rest.fill(0);
        seal(into);
        Ok(())
    }
}

/// Encodes a padding record of `into.len()` words at `position`. Only its first line is written.
pub fn encode_padding(epoch: ProcessEpoch, position: Position, length_bytes: u32, into: &mut [u64; 8]) {
    *into = [0; 8];
    into[0] = position.0 + 1;
    into[2] = u64::from(length_bytes) | (Kind::Padding as u64) << 32 | u64::from(RECORD_VERSION) << 48;
    into[4] = epoch.0;
    seal(into);
}

/// Stores the checksum of a record whose other words are final.
pub fn seal(record: &mut [u64]) {
    if let [commit, sum, behind @ ..] = record {
        *sum = checksum(*commit, behind);
    }
}

/// Stores words and returns what is left. The lengths were added up by `record_bytes`; a mismatch would be a bug of this
/// file and cuts the record, which its checksum and counts then refuse.
#[inline]
fn put(into: &mut [u64], words: impl ExactSizeIterator<Item = u64>) -> &mut [u64] {
    let (head, rest) = into.split_at_mut(words.len().min(into.len()));
    for (slot, word) in head.iter_mut().zip(words) {
        *slot = word;
    }
    rest
}

/// Two 32-bit fields that follow each other, as one word. Records are little-endian, as are the machines that share
/// them.
#[inline]
fn word(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Up to eight bytes as a word, zeros behind them.
#[inline]
fn padded_word(bytes: &[u8]) -> u64 {
    match bytes.try_into() {
        Ok(whole) => u64::from_le_bytes(whole),
        Err(_) => bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// A record whose framing, checksum and counts hold. What its ids name is checked by
/// [`LeaseTable`](crate::lease::LeaseTable).
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    header: &'a RecordHeader,
    request: &'a [u8],
    rows: &'a [RowRecord],
    pairs: &'a [Pair],
    tags: &'a [u64],
}

impl<'a> Plan<'a> {
    /// Parses a private copy of one whole record.
    ///
    /// # Errors
    /// The first [`Refusal`] of checksum, version, flags, kind, mode and counts, in this order.
    pub fn parse(record: &'a [u64]) -> Result<Self, Refusal> {
        let [commit, sum, behind @ ..] = record else {
            let (found, expected) = (record.len() as u64, LINE_BYTES as u64 / 8);
            return Err(Refusal::Counts {
                what: "record words",
                found,
                expected,
            });
        };
        let expected = checksum(*commit, behind);
        if *sum != expected {
            return Err(Refusal::Checksum { found: *sum, expected });
        }
        Self::parse_checked_before(record)
    }

    /// Parses a private copy whose checksum was compared when it was made.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), but for the checksum.
    pub fn parse_checked_before(record: &'a [u64]) -> Result<Self, Refusal> {
        let bytes = record.as_bytes();
        let counts = |what, found: u64, expected: u64| Refusal::Counts { what, found, expected };
        let Ok((header, rest)) = RecordHeader::ref_from_prefix(bytes) else {
            return Err(counts("record bytes", bytes.len() as u64, HEADER_BYTES as u64));
        };
        if header.version >> 8 != RECORD_VERSION >> 8 {
            return Err(Refusal::Version {
                found: header.version,
                expected: RECORD_VERSION,
            });
        }
        let unknown = header.must_understand & !KNOWN_MUST_UNDERSTAND;
        if unknown != 0 {
            return Err(Refusal::Flags { bits: unknown }); // X4
        }
        let kind = Kind::from_code(header.kind).ok_or(Refusal::Kind { found: header.kind })?;
        let mode_fits = match kind {
            Kind::Retain => RetainMode::from_code(header.mode).is_some(),
            _ => header.mode == 0,
        };
        if !mode_fits {
            return Err(Refusal::Mode { found: header.mode });
        }
        if header.length_bytes as usize != bytes.len() {
            return Err(counts(
                "record bytes",
                u64::from(header.length_bytes),
                bytes.len() as u64,
            ));
        }
        let request_bytes = header.request_bytes as usize;
        if request_bytes > MAX_REQUEST_BYTES {
            return Err(Refusal::RequestBytes {
                found: request_bytes as u64,
                expected: MAX_REQUEST_BYTES as u64,
            });
        }
        let cut = || {
            counts(
                "row and pair counts",
                u64::from(header.row_count),
                u64::from(header.pair_count),
            )
        };
        let padded = request_bytes.next_multiple_of(8);
        let (request, rest) = rest.split_at_checked(padded).ok_or_else(cut)?;
        let (rows, rest) =
            <[RowRecord]>::ref_from_prefix_with_elems(rest, header.row_count as usize).map_err(|_| cut())?;
        let (pairs, rest) =
            <[Pair]>::ref_from_prefix_with_elems(rest, header.pair_count as usize).map_err(|_| cut())?;
        let (tags, rest) = if header.may_ignore & FLAG_TAGS != 0 {
            <[u64]>::ref_from_prefix_with_elems(rest, pairs.len()).map_err(|_| cut())?
        } else {
            (&[][..], rest)
        };
        // A newer minor version may add sections behind ours (X4); our own fills its last line.
        if header.version <= RECORD_VERSION && rest.len() >= LINE_BYTES {
            return Err(counts(
                "bytes behind the last pair",
                rest.len() as u64,
                LINE_BYTES as u64 - 1,
            ));
        }
        Ok(Self {
            header,
            request: &request[..request_bytes],
            rows,
            pairs,
            tags,
        })
    }

    /// The header.
    pub fn header(&self) -> &'a RecordHeader {
        self.header
    }

    /// Kind of the record.
    pub fn kind(&self) -> Kind {
        // `parse` has let only known kinds through.
        Kind::from_code(self.header.kind).unwrap_or(Kind::Padding)
    }

    /// Mode of a Retain.
    pub fn mode(&self) -> Option<RetainMode> {
        RetainMode::from_code(self.header.mode)
    }

    /// True where the request ends with this record.
    pub fn is_last_of_request(&self) -> bool {
        self.header.must_understand & FLAG_FINAL != 0
    }

    /// Position of the record in the ring.
    pub fn position(&self) -> Position {
        Position(self.header.commit.wrapping_sub(1))
    }

    /// What the operation leads to.
    pub fn operation(&self) -> Operation {
        Operation {
            request_epoch: RequestEpoch(self.header.request_epoch),
            operation_id: OperationId(self.header.operation_id),
            pool_generation: PoolGeneration(self.header.pool_generation),
            map_revision: MapRevision(self.header.map_revision),
            selection_revision: SelectionRevision(self.header.selection_revision),
        }
    }

    /// The opaque request id.
    pub fn request(&self) -> &'a [u8] {
        self.request
    }

    /// The rows, as they were written.
    pub fn rows(&self) -> &'a [RowRecord] {
        self.rows
    }

    /// The rows, for the checks of [`LeaseTable`](crate::lease::LeaseTable).
    pub fn lease_rows(&self) -> Rows<'a> {
        Rows {
            kind: self.kind(),
            mode: self.mode(),
            rows: self.rows,
            pairs: self.pairs,
        }
    }

    /// The valid pairs of a row. Empty where the row's counts do not fit, which the lease check refuses by name.
    pub fn pairs(&self, row: &RowRecord) -> &'a [Pair] {
        valid_part(self.pairs, row)
    }

    /// The content tags of a row's valid pairs; empty where the plan carries none.
    pub fn tags(&self, row: &RowRecord) -> &'a [u64] {
        valid_part(self.tags, row)
    }

    /// Number of pairs the record carries, valid or not.
    pub fn pair_count(&self) -> usize {
        self.pairs.len()
    }
}

fn valid_part<'a, T>(all: &'a [T], row: &RowRecord) -> &'a [T] {
    let from = row.pairs_at as usize;
    // R24: what is behind the valid count is ignored.
    let valid = if planted("r24_valid_count_unread") {
        row.pairs
    } else {
        row.valid
    };
    all.get(from..from.saturating_add(valid as usize)).unwrap_or(&[])
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
