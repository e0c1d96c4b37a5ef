//! The plan ring, which is the journal (X10, X11).
//!
//! One producer writes records into the control segment; every rank reads all of them at a private cursor. Positions
//! are bytes that only grow. A record's first word is its commit word: its position + 1. There is no shared tail: the
//! word at the tail is never a valid commit, so a reader, and a producer that takes over, find the tail by reading.
//!
//! The order of stores that keeps this true at any instruction (X10):
//! 1. `reclaim`, before any byte below it is overwritten;
//! 2. the bodies of a batch but for its first line, and the commit words of all its records but the first;
//! 3. 0 at the batch's end, the new tail; then the rest of the first line;
//! 4. the commit word of the first record, with release.
//!
//! Both ends keep a private mirror of the ring. The reader's mirror is the copy that it validates and uses (X2); the
//! writer's is what it knows to have published, whatever a peer may have done to the shared bytes.

use kvsluice_layout::ids::{Position, ProcessEpoch};
use kvsluice_layout::plan::{PlanDraft, encode_padding};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{HEADER_BYTES, Kind, LINE_BYTES, LINE_WORDS};
use kvsluice_layout::refusal::Refusal;
use thiserror::Error;

use crate::shared::{Ordering, Shared, SharedMut, fence};

const LINE: u64 = LINE_BYTES as u64;
/// How far ahead of the tail a writer asks for lines.
const WRITE_AHEAD_LINES: u64 = 6;
/// How far ahead of the cursor a reader asks for lines while it finds records.
const READ_AHEAD_LINES: u64 = 6;

/// Where a ring lies in the control segment, and what follows from its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingShape {
    /// First byte of the ring in the segment.
    pub at: usize,
    /// Bytes of the ring, a power of two.
    pub bytes: usize,
}

impl RingShape {
    /// Bytes that only Abort and Reset may use: 1/16 of the ring, at least 64 lines (X10). A ring below
    /// [`MIN_RING_BYTES`](kvsluice_layout::region::MIN_RING_BYTES), which only models have, keeps an eighth.
    pub fn reserve(&self) -> u64 {
        (self.bytes as u64 / 16).max(64 * LINE).min(self.bytes as u64 / 8)
    }

    /// Bytes of the largest record: half the ring less the reserve (X10).
    pub fn max_record(&self) -> u64 {
        (self.bytes as u64 / 2).saturating_sub(self.reserve())
    }

    /// Lines of the ring, which is the number of terminal slots.
    pub fn lines(&self) -> usize {
        self.bytes / LINE_BYTES
    }

    /// Offset of a position within the ring, in bytes.
    #[inline]
    pub fn offset(&self, position: u64) -> usize {
        (position as usize) & (self.bytes - 1)
    }

    #[inline]
    fn shared_at(&self, position: u64) -> usize {
        self.at + self.offset(position)
    }
}

/// Why a record found no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ClaimError {
    /// The record can never fit.
    #[error("record of {bytes} bytes: the largest that this ring takes is {limit}: split the plan or enlarge the ring")]
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Largest record.
        limit: u64,
    },
    /// The record does not fit now.
    #[error("ring full: {needed} bytes needed, {free} free")]
    Full {
        /// Bytes needed, padding at the wrap included.
        needed: u64,
        /// Bytes free for this kind of record.
        free: u64,
    },
}

/// The producer's end of the plan ring.
pub struct PlanWriter<M> {
    memory: M,
    shape: RingShape,
    reclaim_at: usize,
    mirror: Box<[u64]>,
    /// Position behind the last record written, committed or not.
    tail: u64,
    /// First record of the batch that is being written, where there is one.
    batch: Option<u64>,
    reclaim: u64,
    reclaim_stored: u64,
}

impl<M: SharedMut> PlanWriter<M> {
    /// The writer of an empty ring (all zero), or of one whose [reclaim, tail) is read from the journal.
    pub(crate) fn new(memory: M, shape: RingShape, reclaim_at: usize, reclaim: u64, tail: u64) -> Self {
        Self {
            memory,
            shape,
            reclaim_at,
            mirror: vec![0; shape.bytes / 8].into_boxed_slice(),
            tail,
            batch: None,
            reclaim,
            reclaim_stored: reclaim,
        }
    }

    /// Position behind the last record written.
    pub fn tail(&self) -> Position {
        Position(self.tail)
    }

    /// Position behind the last record that readers may see.
    pub fn committed(&self) -> Position {
        Position(self.batch.unwrap_or(self.tail))
    }

    /// Position below which space may be reused.
    pub fn reclaim(&self) -> Position {
        Position(self.reclaim)
    }

    /// The ring's shape.
    pub fn shape(&self) -> RingShape {
        self.shape
    }

    /// The segment that holds the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Bytes free for a data record, or for a control record (X10: the reserve, and one line that stays free).
    pub fn free(&self, control: bool) -> u64 {
        let used = self.tail - self.reclaim + LINE + if control { 0 } else { self.shape.reserve() };
        (self.shape.bytes as u64).saturating_sub(used)
    }

    /// Bytes that a record of `bytes` takes from the ring now, padding at the wrap included.
    ///
    /// # Errors
    /// [`ClaimError`] where it does not fit.
    pub fn claim(&self, bytes: u64, control: bool) -> Result<u64, ClaimError> {
        let limit = self.shape.max_record();
        if bytes > limit {
            return Err(ClaimError::TooLarge { bytes, limit });
        }
        let to_end = self.to_end();
        let needed = if to_end < bytes { to_end + bytes } else { bytes };
        let free = self.free(control);
        if needed > free {
            Err(ClaimError::Full { needed, free })
        } else {
            Ok(needed)
        }
    }

    /// Writes a draft that [`claim`](Self::claim) found room for, behind a padding record where the ring wraps. Nothing
    /// is visible to a reader before [`commit`](Self::commit). Returns the padding's position, if any, and the record's.
    ///
    /// # Errors
    /// [`Refusal`] where the draft cannot be encoded; the ring is as it was.
    pub fn write(
        &mut self,
        draft: &PlanDraft,
        epoch: ProcessEpoch,
        bytes: u64,
    ) -> Result<(Option<(Position, u64)>, Position), Refusal> {
        let to_end = self.to_end();
        let padding = (to_end < bytes).then_some(to_end);
        let position = self.tail + padding.unwrap_or(0);
        let from = self.shape.offset(position) / 8;
        draft.encode(
            epoch,
            Position(position),
            &mut self.mirror[from..from + bytes as usize / 8],
        )?;
        let padding = padding.map(|length| {
            let at = self.tail;
            let mut line = [0; LINE_WORDS];
            encode_padding(epoch, Position(at), length as u32, &mut line);
            let from = self.shape.offset(at) / 8;
            self.mirror[from..from + LINE_WORDS].copy_from_slice(&line);
            self.store_record(at, LINE, length);
            (Position(at), length)
        });
        self.store_record(position, bytes, bytes);
        Ok((padding, Position(position)))
    }

    /// Makes every record written since the last commit visible, with one release store.
    pub fn commit(&mut self) {
        let Some(first) = self.batch.take() else { return };
        // X10: the word at the tail is never a valid commit.
        if !planted("x10_stale_tail") {
            self.memory.store(self.shape.shared_at(self.tail), 0);
        }
        // Readers poll this line: all of it is stored in one go, or it would travel twice.
        let from = self.shape.offset(first) / 8;
        self.memory.copy_in(
            self.shape.shared_at(first) + 8,
            &self.mirror[from + 1..from + LINE_WORDS],
        );
        let commit = first + 1;
        if planted("x10_relaxed_commit") {
            self.memory.store(self.shape.shared_at(first), commit);
        } else {
            // pairs with: ring::PlanReader::receive, which acquires the commit word.
            self.memory.store_release(self.shape.shared_at(first), commit);
        }
        if planted("x10_reclaim_late") {
            self.memory.store_release(self.reclaim_at, self.reclaim);
        }
    }

    /// True where records are written and not committed.
    pub fn has_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// Allows the reuse of every byte below `position`: the caller knows that all ranks are terminal there (X11).
    pub fn set_reclaim(&mut self, position: Position) {
        debug_assert!(
            position >= Position(self.reclaim) && position <= self.committed(),
            "reclaim only grows, up to what is committed"
        );
        self.reclaim = position.0;
    }

    /// The record at `position`, as this process wrote it or read it at a takeover.
    #[inline]
    pub fn record(&self, position: Position, bytes: u64) -> &[u64] {
        let from = self.shape.offset(position.0) / 8;
        self.mirror.get(from..from + bytes as usize / 8).unwrap_or(&[])
    }

    /// Puts a record that a takeover read into the mirror.
    pub(crate) fn fill_mirror(&mut self, position: Position, record: &[u64]) {
        let from = self.shape.offset(position.0) / 8;
        if let Some(into) = self.mirror.get_mut(from..from + record.len()) {
            into.copy_from_slice(record);
        }
    }

    fn to_end(&self) -> u64 {
        self.shape.bytes as u64 - self.shape.offset(self.tail) as u64
    }

    /// Copies the mirror's record into the ring. The commit word goes in only behind the first record of a batch.
    fn store_record(&mut self, position: u64, copied: u64, length: u64) {
        if self.reclaim != self.reclaim_stored && !planted("x10_reclaim_late") {
            self.memory.store_release(self.reclaim_at, self.reclaim);
            self.reclaim_stored = self.reclaim;
            // X10: whoever sees a byte of the new record also sees the reclaim that allowed it.
            // pairs with: recovery::scan and the acquire of a commit word by inspecting readers.
            fence(Ordering::Release);
        }
        let from = self.shape.offset(position) / 8;
        let at = self.shape.shared_at(position);
        let first_word = if self.batch.is_none() && !planted("x10_commit_early") {
            LINE_WORDS
        } else {
            0
        };
        self.batch.get_or_insert(position);
        let words = &self.mirror[from + first_word..from + copied as usize / 8];
        self.memory.copy_in(at + first_word * 8, words);
        self.tail = position + length;
        // The ranks have read these lines a lap ago: taking them back takes a while each, so several at a time.
        for line in 0..(copied / LINE).min(4) {
            self.memory
                .prefetch_write(self.shape.shared_at(self.tail + (WRITE_AHEAD_LINES + line) * LINE));
        }
    }
}

/// Framing that a reader cannot trust: it reports, drains and detaches; nothing is skipped (X9).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("broken record at {position}: found {found:#x} where {expected} was expected: detaching; restart the producer")]
pub struct Broken {
    /// Position of the record.
    pub position: Position,
    /// The word found.
    pub found: u64,
    /// What stands there in a whole ring.
    pub expected: &'static str,
}

/// A record that was copied out: where it lies in the mirror.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordAt {
    /// Position of the record.
    pub position: Position,
    /// Its bytes, a multiple of 64; of a padding record only the first line was copied.
    pub bytes: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// A rank's end of the plan ring.
pub struct PlanReader<M> {
    memory: M,
    shape: RingShape,
    mirror: Box<[u64]>,
    cursor: u64,
}

impl<M: Shared> PlanReader<M> {
    /// A reader whose first record is the one at `first`. X33: a `first` that is no position in a ring is bent to one,
    /// where the framing check then refuses what stands there.
    pub fn new(memory: M, shape: RingShape, first: Position) -> Self {
        Self {
            memory,
            shape,
            mirror: vec![0; shape.bytes / 8].into_boxed_slice(),
            cursor: first.0.min(u64::MAX / 2) & !(LINE - 1),
        }
    }

    /// Position of the next record.
    pub fn cursor(&self) -> Position {
        Position(self.cursor)
    }

    /// The segment that holds the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The ring's shape.
    pub fn shape(&self) -> RingShape {
        self.shape
    }

    /// True where a record waits at the cursor: one relaxed load.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.memory.load(self.shape.shared_at(self.cursor)) != 0
    }

    /// Copies the next record into the mirror, where one is committed.
    ///
    /// Each shared word is read once; lengths are checked on the copy. The bytes stay in the mirror until the producer
    /// reuses the record's place, which it may not before this rank's terminal (X11): `unanswered` is the position of
    /// the oldest record that this rank still uses, and nothing is copied over it.
    ///
    /// # Errors
    /// [`Broken`] for a commit word or a length that no producer writes.
    pub fn receive(&mut self, unanswered: Position) -> Result<Option<RecordAt>, Broken> {
        let at = self.shape.shared_at(self.cursor);
        let commit = self.memory.load_acquire(at); // pairs with: ring::PlanWriter::commit
        if commit == 0 {
            // A record is seldom one line: its next lines come with the first, and not one after the other.
            self.memory.prefetch(at + LINE_BYTES);
            self.memory.prefetch(at + 2 * LINE_BYTES);
            return Ok(None);
        }
        let position = Position(self.cursor);
        if commit != self.cursor + 1 {
            return Err(Broken {
                position,
                found: commit,
                expected: "0 or position + 1",
            });
        }
        let last = unanswered.0.saturating_add(self.shape.bytes as u64);
        if self.cursor + LINE > last {
            return Err(Broken {
                position,
                found: commit,
                expected: "a record that this rank answered before its reuse",
            });
        }
        let offset = self.shape.offset(self.cursor);
        let from = offset / 8;
        self.mirror[from] = commit;
        self.memory
            .copy_out(at + 8, &mut self.mirror[from + 1..from + LINE_WORDS]);
        // length_bytes and kind share the third word of the header.
        let word = self.mirror[from + 2];
        let bytes = word & 0xffff_ffff;
        let kind = (word >> 32) as u16;
        let padding = kind == Kind::Padding as u16;
        let least = if padding { LINE } else { HEADER_BYTES as u64 };
        let to_end = (self.shape.bytes - offset) as u64;
        let most = if padding {
            to_end
        } else {
            to_end.min(self.shape.max_record())
        };
        if bytes < least || bytes > most || !bytes.is_multiple_of(LINE) || self.cursor + bytes > last {
            return Err(Broken {
                position,
                found: word,
                expected: "a length within the ring",
            });
        }
        let copied = if padding { LINE } else { bytes };
        self.memory.copy_out(
            at + LINE_BYTES,
            &mut self.mirror[from + LINE_WORDS..from + copied as usize / 8],
        );
        self.cursor += bytes;
        // The next records are probably there too; each line is fetched from the other core, so several at a time.
        for line in 0..(copied / LINE).min(4) {
            self.memory
                .prefetch(self.shape.shared_at(self.cursor + (READ_AHEAD_LINES + line) * LINE));
        }
        Ok(Some(RecordAt {
            position,
            bytes,
            copied,
        }))
    }

    /// The private copy of a record.
    #[inline]
    pub fn record(&self, at: RecordAt) -> &[u64] {
        let from = self.shape.offset(at.position.0) / 8;
        self.mirror.get(from..from + at.copied as usize / 8).unwrap_or(&[])
    }
}
