//! A second thread that stores into a channel at the very time at which it is decoded: control words, members, records
//! of the ring, slots. What is accepted must be sound in the copy that is used (X2, X33).

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use kvsluice_layout::ids::{Position, Rank};
use kvsluice_transport::members::read_member;
use kvsluice_transport::recovery::scan;
use kvsluice_transport::shared::{Heap, Shared, SharedMut};
use kvsluice_transport::slots::{SlotState, read_slot};

use super::channel::{Channel, RANKS, USED_BYTES, dress};
use super::input::{Input, words};
use super::port::receive_all;

/// Where the second thread stores, and what: (place, word).
type Stores = Vec<(usize, u64)>;

struct Race {
    channel: Channel,
    /// What is stored over and over, until the next input.
    stores: Arc<Mutex<Arc<Stores>>>,
}

thread_local! {
    static RACE: RefCell<Race> = RefCell::new(Race::new());
}

impl Race {
    fn new() -> Self {
        let race = Self {
            channel: Channel::new(),
            stores: Arc::default(),
        };
        let memory = [race.channel.control.clone(), race.channel.ranks[0].clone()];
        // Ends when the thread that decodes has gone.
        let stores = Arc::downgrade(&race.stores);
        std::thread::spawn(move || {
            while let Some(stores) = stores.upgrade() {
                let now = stores.lock().unwrap_or_else(PoisonError::into_inner).clone();
                drop(stores);
                for (at, word) in now.iter() {
                    // The ranks' segments follow the control segment.
                    let [control, rank] = &memory;
                    match at.checked_sub(control.size()) {
                        None => control.store_release(*at, *word),
                        Some(at) => rank.store_release(at, *word),
                    }
                }
            }
        });
        race
    }
}

/// Two rings, one in place and one that is stored over it, and single words. It goes on while the next input is read:
/// this is the one target whose inputs may find another thing, or none, the next time.
pub fn race(data: &[u8]) {
    let mut input = Input(data);
    let (sealed, other_sealed) = (input.byte(), input.byte());
    RACE.with_borrow(|race| {
        let (channel, shape) = (&race.channel, race.channel.shape);
        let half = input.0.len() / 2;
        let mut rings = [input.bytes(half.min(USED_BYTES)), input.bytes(USED_BYTES)].map(words);
        for (ring, sealed) in rings.iter_mut().zip([sealed, other_sealed]) {
            ring.resize(ring.len().next_multiple_of(8), 0);
            dress(ring, 0, sealed);
        }
        let [ring, other] = rings;
        channel.control.copy_in(shape.at, &ring);
        let mut stores: Stores = (shape.at..).step_by(8).zip(other.iter().copied()).collect();
        stores.extend((shape.at..).step_by(8).zip(ring.iter().copied()));
        let first = other.first().copied().unwrap_or(0);
        for (place, word) in [
            (channel.regions.member_at(Rank(0)), first),
            (slot_at(channel, 0), first),
        ] {
            stores.push((place, word));
        }
        *race.stores.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(stores);
        decode(channel);
    });
}

fn slot_at(channel: &Channel, line: usize) -> usize {
    channel.control.size() + kvsluice_layout::region::SLOTS_AT + 64 * line
}

fn decode(channel: &Channel) {
    let control: &Heap = &channel.control;
    for rank in (0..RANKS).map(Rank) {
        let _ = read_member(control, &channel.regions, rank);
        match read_slot(&channel.ranks[0], channel.shape, Position(0)) {
            SlotState::Answered(slot) => assert_eq!(slot.commit, 1),
            SlotState::Open | SlotState::Stray(_) => {}
        }
    }
    let _ = scan(control, channel.shape, |record, words| {
        assert_eq!(words[0], record.position.0 + 1);
        Ok(())
    });
    receive_all(channel, control.clone(), 0x55);
}
