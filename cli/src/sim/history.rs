//! What happened: a digest of all of it, and the last of it in words.

use std::collections::VecDeque;
use std::fmt;

/// Events that are kept for the message of a failure.
const KEPT: usize = 40;

/// One event: what, and two numbers that say more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    step: u64,
    what: &'static str,
    first: u64,
    second: u64,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9}  {} {} {}", self.step, self.what, self.first, self.second)
    }
}

/// The history of one run.
#[derive(Debug, Default)]
pub(super) struct History {
    digest: u64,
    recent: VecDeque<Event>,
    /// Steps so far.
    pub(super) step: u64,
}

impl History {
    /// Adds an event.
    pub(super) fn add(&mut self, what: &'static str, first: u64, second: u64) {
        let name = what
            .bytes()
            .fold(0_u64, |name, byte| name.rotate_left(7) ^ u64::from(byte));
        for word in [self.step, name, first, second] {
            // A multiplicative hash with the increment of SplitMix64.
            self.digest = (self.digest ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        let step = self.step;
        self.recent.push_back(Event {
            step,
            what,
            first,
            second,
        });
    }

    /// Digest of every event so far: equal for two runs that went the same way.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    /// The last events.
    pub(super) fn recent(&self) -> impl Iterator<Item = &Event> {
        self.recent.iter()
    }
}
