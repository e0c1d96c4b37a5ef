//! The adversary: a host device that does everything the contract allows at the worst moment (D2).
//!
//! Off by default. All choices come from one seed, so a failure is reproduced by its seed; on the stepped engine
//! exactly, on threads up to the scheduling of the threads.

use fastrand::Rng;

/// Something that goes wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The n-th submit copies a part of its bytes and fails.
    FailCopy,
    /// The device is lost when the n-th submit starts.
    LoseDevice,
    /// The n-th event never fires, and its queue stands still.
    MuteEvent,
    /// The n-th pinned chunk is refused, and the driver keeps a sticky error.
    RefusePin,
}

/// A fault at a chosen place. Each kind counts its own occasions from 0, over all queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scripted {
    /// The occasion.
    pub at: u64,
    /// What happens there.
    pub fault: Fault,
}

/// How nasty a host device is. The default is not at all.
#[derive(Clone, Debug, Default)]
pub struct Adversary {
    /// Source of every choice.
    pub seed: u64,
    /// Each submit and table write waits for up to so many ticks at the head of its queue before its first byte is
    /// read. A tick is a step of the stepped engine, or a poll that finds an event pending.
    pub hold_max: u32,
    /// Queues take turns at random.
    pub interleave: bool,
    /// Fragments are torn into pieces of up to so many bytes, copied in any order. 0 keeps them whole.
    pub piece_bytes_max: u64,
    /// Chance that a submit fails, in parts per million.
    pub fail_copy_ppm: u32,
    /// Chance that a submit loses the device, in parts per million.
    pub lose_device_ppm: u32,
    /// Chance that an event never fires, in parts per million.
    pub mute_event_ppm: u32,
    /// Faults at chosen places, besides the random ones.
    pub script: Vec<Scripted>,
}

impl Adversary {
    /// Late, torn and interleaved, and nothing fails: a correct worker notices nothing.
    pub fn late(seed: u64) -> Self {
        Self {
            seed,
            hold_max: 16,
            interleave: true,
            piece_bytes_max: 64,
            ..Self::default()
        }
    }

    /// Adds a scripted fault.
    #[must_use]
    pub fn with(mut self, at: u64, fault: Fault) -> Self {
        self.script.push(Scripted { at, fault });
        self
    }
}

/// What happens to a submit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Normal,
    Fail,
    LoseDevice,
}

/// The adversary at work: its dice and its counters.
pub(crate) struct Dice {
    rules: Adversary,
    rng: Rng,
    submits: u64,
    events: u64,
    pins: u64,
}

impl Dice {
    pub(crate) fn new(rules: Adversary) -> Self {
        let rng = Rng::with_seed(rules.seed);
        Self {
            rules,
            rng,
            submits: 0,
            events: 0,
            pins: 0,
        }
    }

    fn scripted(&self, at: u64, fault: Fault) -> bool {
        self.rules.script.contains(&Scripted { at, fault })
    }

    fn chance(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.rng.u32(0..1_000_000) < ppm
    }

    /// What happens to the next submit.
    pub(crate) fn fate(&mut self) -> Fate {
        let at = self.submits;
        self.submits += 1;
        if self.scripted(at, Fault::LoseDevice) || self.chance(self.rules.lose_device_ppm) {
            Fate::LoseDevice
        } else if self.scripted(at, Fault::FailCopy) || self.chance(self.rules.fail_copy_ppm) {
            Fate::Fail
        } else {
            Fate::Normal
        }
    }

    /// Whether the next event never fires.
    pub(crate) fn mutes(&mut self) -> bool {
        let at = self.events;
        self.events += 1;
        self.scripted(at, Fault::MuteEvent) || self.chance(self.rules.mute_event_ppm)
    }

    /// Whether the next chunk is refused.
    pub(crate) fn refuses_pin(&mut self) -> bool {
        let at = self.pins;
        self.pins += 1;
        self.scripted(at, Fault::RefusePin)
    }

    /// Ticks that the next submit is held for.
    pub(crate) fn hold(&mut self) -> u32 {
        if self.rules.hold_max == 0 {
            0
        } else {
            self.rng.u32(0..=self.rules.hold_max)
        }
    }

    /// Whether ticks are counted at all.
    pub(crate) fn holds(&self) -> bool {
        self.rules.hold_max > 0
    }

    /// The queue to look at first, of `count`.
    pub(crate) fn first_queue(&mut self, turn: usize, count: usize) -> usize {
        if self.rules.interleave {
            self.rng.usize(0..count)
        } else {
            turn % count
        }
    }

    /// Whether one step does one thing only: no batching of fragments or of commands.
    pub(crate) fn single_steps(&self) -> bool {
        self.rules.interleave || self.tears()
    }

    /// Whether fragments are torn.
    pub(crate) fn tears(&self) -> bool {
        self.rules.piece_bytes_max > 0
    }

    /// Which of `count` fragments is next.
    pub(crate) fn fragment(&mut self, count: usize) -> usize {
        if self.tears() { self.rng.usize(0..count) } else { 0 }
    }

    /// Length of the next piece of a fragment with `bytes` left, and whether it is cut from the end.
    pub(crate) fn piece(&mut self, bytes: usize) -> (usize, bool) {
        if !self.tears() {
            return (bytes, false);
        }
        let most = bytes.min(self.rules.piece_bytes_max as usize).max(1);
        (self.rng.usize(1..=most), self.rng.bool())
    }

    /// How many of `count` fragments a failing submit copies before it fails.
    pub(crate) fn survivors(&mut self, count: usize) -> usize {
        self.rng.usize(0..=count)
    }
}
