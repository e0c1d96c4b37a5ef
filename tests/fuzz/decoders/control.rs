//! The head of a control segment that changes while it is read: header, charter and membership.

use std::cell::RefCell;

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::charter::{CHARTER_HEAD_BYTES, Charter, checksum};
use kvsluice_layout::ids::{ChannelId, Rank};
use kvsluice_layout::region::{CHARTER_AT, MEMBERSHIP_AT, layout_hash};
use kvsluice_layout::segment::{Expected, HEADER_BYTES, READY, SegmentHeader, SegmentKind};
use kvsluice_transport::charter::{read_charter, write_charter};
use kvsluice_transport::members::read_member;
use kvsluice_transport::shared::{Heap, Shared, SharedMut};

use super::channel::{Channel, PRODUCER, RANKS};
use super::input::{Input, words};
use super::memory::{Change, Shifting};

struct Head {
    channel: Channel,
    /// The whole bytes up to the ring, to begin each input from.
    whole: Vec<u64>,
    charter: Charter,
    expected: Expected,
}

thread_local! {
    static HEAD: RefCell<Head> = RefCell::new(Head::new());
}

impl Head {
    fn new() -> Self {
        let channel = Channel::new();
        let size_bytes = channel.regions.control_bytes() as u64;
        let expected = Expected {
            kind: SegmentKind::Control,
            size_bytes,
            layout_hash: layout_hash(),
            boot_id: [7; 16],
            channel: Some(ChannelId(5)),
            creator_epoch: Some(PRODUCER),
        };
        let (channel_id, hash) = (ChannelId(5), layout_hash());
        let mut header = SegmentHeader::new(SegmentKind::Control, size_bytes, hash, [7; 16], channel_id, PRODUCER);
        header.ready = READY.into();
        channel.control.copy_in(0, &header.to_words());
        let kinds = SourceKinds {
            source_only: true,
            copy: false,
        };
        let capability = Capability::of(channel.map.geometry(), SelectionUnit::Block, kinds, PRODUCER);
        let charter = Charter::new(channel.map.geometry(), &channel.regions, &capability);
        write_charter(&channel.control, &channel.regions, &charter).expect("room");
        let mut whole = vec![0; channel.shape.at / 8];
        channel.control.copy_out(0, &mut whole);
        Self {
            channel,
            whole,
            charter,
            expected,
        }
    }
}

/// The first byte says what is decoded; bit 7, whether the charter's text is the input's; bit 6, whether its checksum is
/// made to fit.
pub fn control(data: &[u8]) {
    let mut input = Input(data);
    let what = input.byte();
    HEAD.with_borrow(|head| {
        let memory = &head.channel.control;
        let places = [
            0..HEADER_BYTES,
            MEMBERSHIP_AT..MEMBERSHIP_AT + 64 * RANKS as usize,
            CHARTER_AT..CHARTER_AT + head.channel.regions.charter_room(),
        ];
        let changes = Change::read(&mut input, &places);
        let patches = Change::read(&mut input, &places);
        let mut dirty: Vec<_> = changes.iter().chain(&patches).map(|change| change.at).collect();
        dirty.extend([CHARTER_AT, CHARTER_AT + 8]);
        for patch in patches {
            // A few bits of one byte: what is changed so is mostly a text still.
            let flip = (patch.word & 15) << (8 * (patch.word >> 4 & 7));
            memory.store(patch.at, memory.load(patch.at) ^ flip);
        }
        if what & 0x80 != 0 {
            let text = input.rest();
            let text = &text[..text.len().min(head.channel.regions.charter_room())];
            memory.store(CHARTER_AT, text.len() as u64);
            memory.copy_in(CHARTER_AT + CHARTER_HEAD_BYTES, &words(text));
            dirty.extend(
                (CHARTER_AT + CHARTER_HEAD_BYTES..)
                    .step_by(8)
                    .take(text.len().div_ceil(8)),
            );
        }
        if what & 0x40 != 0 {
            seal_charter(memory);
        }
        let memory = Shifting::new(memory, changes);
        match what % 4 {
            0 => header(&memory, &head.expected),
            1 => members(&memory, head),
            _ => {
                let charter = read_charter(&memory).ok();
                if let Some(charter) = &charter {
                    assert_whole(charter);
                }
                // X26: nobody else has the checksum.
                assert!(what & 0x40 != 0 || charter.is_none_or(|charter| charter == head.charter));
            }
        }
        // The next input starts from the whole head.
        for at in dirty {
            head.channel.control.store(at, head.whole[at / 8]);
        }
    });
}

fn seal_charter(memory: &Heap) {
    let length = (memory.load(CHARTER_AT) as usize).min(memory.size() - CHARTER_AT - CHARTER_HEAD_BYTES);
    let mut text = vec![0; length];
    memory.bytes_out(CHARTER_AT + CHARTER_HEAD_BYTES, &mut text);
    memory.store(CHARTER_AT + 8, checksum(&text));
}

fn header(memory: &Shifting, expected: &Expected) {
    let mut words = [0; HEADER_BYTES / 8];
    memory.copy_out(0, &mut words);
    let header = SegmentHeader::from_words(&words);
    assert_eq!(header.to_words(), words);
    match header.check(expected) {
        Ok(()) => {
            assert_eq!(
                (header.ready.get(), header.layout_hash.get()),
                (READY, expected.layout_hash)
            );
            assert_eq!(
                (header.size_bytes.get(), header.boot_id),
                (expected.size_bytes, expected.boot_id)
            );
            assert_eq!((header.kind.get(), header.rank.get()), (1, 0));
            assert_eq!((header.channel.get(), header.creator_epoch.get()), (5, PRODUCER.0));
        }
        Err(refused) => assert_ne!(refused.found, refused.expected, "{refused}"),
    }
}

fn members(memory: &Shifting, head: &Head) {
    for rank in (0..RANKS).map(Rank) {
        let member = read_member(memory, &head.channel.regions, rank);
        // Any pair of words is one; what follows from it is `journal`'s.
        let _ = (member.epoch, member.first);
    }
}

fn assert_whole(charter: &Charter) {
    charter.geometry.validate().expect("an accepted geometry");
    let map = charter.map().expect("accepted sizes");
    let text = charter.to_text(usize::MAX).expect("text");
    assert_eq!(
        Charter::from_text(&text, checksum(&text)).expect("its own text"),
        *charter
    );
    assert!(map.ring_bytes().is_power_of_two() && map.ring_at() + map.ring_bytes() <= map.control_bytes());
}
