//! A private copy of a segment's first bytes, which the production decoders read in the segment's place (X2).
//!
//! It is taken with `pread`, not by mapping: a named segment that is cut short meanwhile is then a short read and no
//! SIGBUS, and a reader that never maps a segment can never write one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::shared::Shared;

/// The first bytes of a segment, as they were a moment ago.
pub(super) struct Picture {
    words: Vec<u64>,
}

impl Picture {
    /// Reads the first `bytes` bytes, a multiple of 8.
    pub(super) fn take(file: &File, bytes: usize) -> io::Result<Self> {
        Ok(Self {
            words: read_words(file, 0, bytes / 8)?,
        })
    }

    /// A copy that somebody else has taken.
    pub(super) fn of(words: Vec<u64>) -> Self {
        Self { words }
    }

    /// Puts a word that was read later in the place of one read before.
    pub(super) fn replace(&mut self, at: usize, word: u64) {
        if let Some(old) = self.words.get_mut(at / 8) {
            *old = word;
        }
    }
}

impl Shared for Picture {
    fn size(&self) -> usize {
        self.words.len() * 8
    }

    /// 0 outside the picture: whoever made the segment may have lied about anything.
    fn load(&self, at: usize) -> u64 {
        self.words.get(at / 8).copied().unwrap_or(0)
    }

    fn load_u32(&self, at: usize) -> u32 {
        (self.load(at & !7) >> (at % 8 * 8)) as u32
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        for (i, byte) in into.iter_mut().enumerate() {
            let at = at + i;
            *byte = self.load(at & !7).to_ne_bytes()[at % 8];
        }
    }
}

/// Reads `count` words at `at`.
pub(super) fn read_words(file: &File, at: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    file.read_exact_at(&mut bytes, at)?;
    let words = bytes.chunks_exact(8).map(|word| {
        let mut whole = [0; 8];
        whole.copy_from_slice(word);
        u64::from_ne_bytes(whole)
    });
    Ok(words.collect())
}
