//! An input, read from its start. Where it has ended it reads as zeros.

pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(super) fn word(&mut self) -> u64 {
        word(self.bytes(8))
    }

    /// One of `count`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        word(self.bytes(2)) as usize % count.max(1)
    }

    /// A small number mostly, and sometimes any.
    pub(super) fn number(&mut self) -> u32 {
        match self.byte() {
            small @ 0..=223 => u32::from(small),
            224..=239 => self.below(1 << 16) as u32,
            _ => word(self.bytes(4)) as u32,
        }
    }
}

/// Up to eight bytes as a word, filled up with zeros.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
}

/// The bytes as words, the last one filled up with zeros.
pub(super) fn words(data: &[u8]) -> Vec<u64> {
    data.chunks(8).map(word).collect()
}
