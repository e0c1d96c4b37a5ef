//! What a dead producer left, and what living workers say about it: `recovery::scan`, `Producer::take_over`, and the view
//! of `kvsluice inspect`.

use std::cell::RefCell;

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::charter::Charter;
use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::Plan;
use kvsluice_layout::record::TerminalSlot;
use kvsluice_layout::region::{GENERATION_AT, INCARNATION_AT, RECLAIM_AT, SLOTS_AT};
use kvsluice_transport::inspect::describe_copies;
use kvsluice_transport::members::{Member, write_member};
use kvsluice_transport::producer::Producer;
use kvsluice_transport::recovery::scan;
use kvsluice_transport::shared::{Shared, SharedMut};
use kvsluice_transport::slots::write_slot;

use super::channel::{Channel, PRODUCER, RANKS, USED_BYTES, dress, first_words};
use super::input::{Input, words};
use super::memory::{Change, Shifting};

thread_local! {
    static CHANNEL: RefCell<(Channel, Charter)> = RefCell::new({
        let channel = Channel::new();
        let kinds = SourceKinds { source_only: true, copy: false };
        let capability = Capability::of(channel.map.geometry(), SelectionUnit::Block, kinds, PRODUCER);
        let charter = Charter::new(channel.map.geometry(), &channel.regions, &capability);
        (channel, charter)
    });
}

pub fn journal(data: &[u8]) {
    let mut input = Input(data);
    let (flags, sealed) = (input.byte(), input.byte());
    let flag = |bit: u8| flags >> bit & 1 == 1;
    CHANNEL.with_borrow(|(channel, charter)| {
        let (control, shape) = (&channel.control, channel.shape);
        // Any number of laps, and within the first lines of one.
        let lap = if flag(0) {
            input.word() >> 1 & !(shape.bytes as u64 - 1)
        } else {
            0
        };
        let reclaim = lap + 64 * u64::from(input.byte() % 8);
        control.store(RECLAIM_AT, if flag(1) { input.word() } else { reclaim });
        control.store(INCARNATION_AT, if flag(2) { input.word() } else { 1 });
        control.store(GENERATION_AT, if flag(2) { input.word() } else { 0 });
        for rank in (0..RANKS).map(Rank) {
            let (epoch, first) = if flag(3) {
                (input.word(), input.word())
            } else {
                (7 + rank.0 as u64, 0)
            };
            let (epoch, first) = (ProcessEpoch(epoch), Position(first));
            write_member(control, &channel.regions, rank, Member { epoch, first });
        }
        let control_changes = Change::read(&mut input, &channel.control_places());
        let rank_changes = Change::read(&mut input, &Channel::rank_places());
        let answers: Vec<_> = (0..input.byte() % 8)
            .map(|_| [input.byte(), input.byte(), input.byte()])
            .collect();
        let answered = answers.len();
        let begin = shape.offset(reclaim);
        let mut ring = words(input.bytes(USED_BYTES - begin));
        ring.resize(ring.len() / 8 * 8, 0);
        dress(&mut ring, reclaim, sealed);
        control.copy_in(shape.at + begin, &ring);
        for [rank, line, how] in answers {
            let rank = (u32::from(rank) % RANKS) as usize;
            let position = reclaim + 64 * (u64::from(line) % (USED_BYTES as u64 / 64 - 8));
            let answer = TerminalSlot {
                // Mostly to the record that lies there.
                identity: control.load(shape.at + shape.offset(position) + 8) ^ u64::from(how >> 6),
                producer_epoch: PRODUCER.0,
                worker_epoch: 7 + rank as u64,
                status: how & 7,
                reason: u16::from(how),
                bytes_moved: u64::MAX / 2,
                ..TerminalSlot::default()
            };
            write_slot(&channel.ranks[rank], shape, Position(position), &answer);
        }
        if flag(4) {
            // Behind them a copy reads as zeros.
            let all = [&channel.ranks[0], &channel.ranks[1]];
            let ranks = (0..)
                .zip(all)
                .map(|(rank, words)| (Rank(rank), first_words(words, SLOTS_AT + USED_BYTES)))
                .collect();
            let (report, _) = describe_copies(
                first_words(control, shape.at + USED_BYTES),
                charter,
                &channel.regions,
                ranks,
            );
            assert!(report.reclaim <= report.tail, "{} to {}", report.reclaim, report.tail);
            for lease in report.leases {
                let group = &channel.map.geometry().groups[lease.group as usize];
                // Rejected records are among them: their ids may be of no pool, but are not more than were written.
                assert!(lease.source_blocks + lease.device_blocks <= USED_BYTES / 4, "{group:?}");
            }
        }
        // Where nothing changes and nobody has answered, a takeover holds what the journal leases (X14).
        let steady = control_changes.is_empty() && rank_changes.is_empty() && answered == 0 && flags & 0x48 == 0;
        let mut expected = LeaseTable::new(&channel.map);
        if steady {
            let _ = scan(control, shape, |_, words| {
                if let Ok(plan) = Plan::parse_checked_before(words) {
                    expected.take(&plan.lease_rows());
                }
                Ok(())
            });
        }
        let control = Shifting::new(control, control_changes);
        if flag(5) {
            let mut next = None;
            let read = scan(&control, shape, |record, words| {
                assert!(next.is_none_or(|next| record.position.0 == next));
                assert!(words.len() as u64 * 8 <= record.bytes && words[0] == record.position.0 + 1);
                next = Some(record.position.0 + record.bytes);
                Ok(())
            });
            if let Ok((reclaim, tail)) = read {
                assert!(tail.0 - reclaim.0 <= shape.bytes as u64 && next.is_none_or(|next| next == tail.0));
            }
        }
        let alive = |rank: &u32| !flag(6) || *rank == 0;
        let survivors = (0..RANKS).filter(alive).map(|rank| {
            let segment = Shifting::new(&channel.ranks[rank as usize], rank_changes.clone());
            (Rank(rank), segment, ProcessEpoch(7 + rank as u64), rank)
        });
        let leases = LeaseTable::new(&channel.map);
        let taken = Producer::take_over(
            control,
            channel.regions.clone(),
            leases,
            ProcessEpoch(9),
            survivors.collect(),
        );
        if let Ok(mut producer) = taken {
            assert!(producer.tail().0 - producer.reclaim().0 <= shape.bytes as u64);
            assert!(!steady || producer.leases().leased_blocks() == expected.leased_blocks());
            producer.poll_thorough();
            for rank in (0..RANKS).map(Rank) {
                producer.lose(rank);
            }
            producer.poll_thorough();
            while producer.next_completion().is_some() {}
            // X11, X14: nobody owes anything any more.
            assert_eq!((producer.in_flight(), producer.leases().leased_blocks()), (0, 0));
        }
        channel.clear();
    });
}
