//! What workers write: terminal slots and hints of two ranks, under a producer that has plans in flight.
//!
//! No source and no destination is free before every rank has answered or is lost, whatever they write (X11, X33).

use std::cell::RefCell;

use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, OperationId, PhysicalBlock, PoolGeneration, Position, ProcessEpoch, Rank,
    SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::record::{SourceKind, TerminalSlot};
use kvsluice_layout::region::{RANK_GENERATION_AT, SLOTS_AT};
use kvsluice_transport::producer::Producer;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::shared::{Heap, Shared, SharedMut};
use kvsluice_transport::slots::write_slot;

use super::channel::{Channel, PRODUCER, RANKS};
use super::input::Input;
use super::memory::{Change, Shifting};

const RECORDS: usize = 4;
const OPS_MAX: usize = 32;

thread_local! {
    static CHANNEL: RefCell<Channel> = RefCell::new(Channel::new());
}

struct Case<'a> {
    channel: &'a Channel,
    shape: RingShape,
    producer: Producer<Heap, Shifting>,
    /// The uploads; the one of index i has the blocks i + 1.
    positions: Vec<Position>,
    /// By rank and record: its commit word has stood in its slot, or the rank is lost.
    told: [[bool; RECORDS]; RANKS as usize],
}

pub fn answers(data: &[u8]) {
    CHANNEL.with_borrow(|channel| {
        let mut input = Input(data);
        let changes = [(); RANKS as usize].map(|()| Change::read(&mut input, &Channel::rank_places()));
        let mut case = Case::new(channel, changes);
        for _ in 0..OPS_MAX {
            if input.is_over() {
                break;
            }
            case.step(&mut input);
            case.assert_held();
        }
        case.end();
        channel.clear();
    });
}

fn operation(id: u64) -> Operation {
    Operation {
        operation_id: OperationId(id),
        pool_generation: PoolGeneration(1),
        ..Operation::default()
    }
}

impl<'a> Case<'a> {
    fn new(channel: &'a Channel, changes: [Vec<Change>; RANKS as usize]) -> Self {
        let leases = LeaseTable::new(&channel.map);
        let control = channel.control.clone();
        let mut producer = Producer::new(control, channel.regions.clone(), leases, PRODUCER);
        let mut told = [[false; RECORDS]; RANKS as usize];
        let shape = channel.shape;
        let segments = channel.ranks.iter().zip(&changes);
        for (rank, (segment, changes)) in (0..).zip(segments) {
            // The Reset is answered before it is asked for, so that no change comes in between.
            segment.store(RANK_GENERATION_AT, 1);
            let segment = Shifting::new(segment, changes.clone());
            producer.join(Rank(rank), segment, ProcessEpoch(7 + u64::from(rank)), rank);
        }
        let mut draft = PlanDraft::new();
        draft.reset(PoolGeneration(1));
        let mut positions = Vec::with_capacity(RECORDS);
        let _ = producer.publish(&draft);
        for id in 1..=RECORDS as u32 {
            let pair = (SourceBlock(id), DestinationBlock(id));
            draft.upload(b"", operation(u64::from(id))).row(
                DecoderLayer(0),
                GroupId(0),
                SourceKind::SourceOnly,
                [pair],
            );
            // A change may close the channel meanwhile (X24).
            let Ok(position) = producer.publish(&draft) else { break };
            positions.push(position);
        }
        for (told, changes) in told.iter_mut().zip(&changes) {
            for (told, position) in told.iter_mut().zip(&positions) {
                let slot = SLOTS_AT + shape.offset(position.0);
                *told = changes.iter().any(|c| (c.at, c.word) == (slot, position.0 + 1));
            }
        }
        Self {
            channel,
            shape,
            producer,
            positions,
            told,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.byte();
        let (rank, record) = (usize::from(op >> 3 & 1), usize::from(op >> 4) % RECORDS);
        let segment = &self.channel.ranks[rank];
        let position = self.positions.get(record).copied().unwrap_or(Position(0));
        let slot = SLOTS_AT + self.shape.offset(position.0);
        match op % 8 {
            0 => {
                let identity = self
                    .channel
                    .control
                    .load(self.shape.at + self.shape.offset(position.0) + 8);
                let how = input.byte();
                let answer = TerminalSlot {
                    identity: identity ^ u64::from(how >> 7),
                    producer_epoch: PRODUCER.0,
                    worker_epoch: 7 + rank as u64,
                    status: how & 7,
                    bytes_moved: u64::from(how) << 57,
                    ..TerminalSlot::default()
                };
                write_slot(segment, self.shape, position, &answer);
                self.told[rank][record] = true;
            }
            1 => {
                let (at, word) = (slot + usize::from(input.byte() % 8) * 8, input.word());
                segment.store(at, word);
                self.told[rank][record] |= (at, word) == (slot, position.0 + 1);
            }
            2 => {
                segment.store(slot, position.0 + 1);
                self.told[rank][record] = true;
            }
            3 => {
                let [words, _] = Channel::rank_places();
                segment.store(words.start + input.below(words.len() / 8) * 8, input.word());
            }
            4 => _ = self.producer.poll(),
            5 => _ = self.producer.poll_thorough(),
            6 => {
                self.producer.lose(Rank(rank as u32));
                self.told[rank] = [true; RECORDS];
            }
            _ => {
                let mut draft = PlanDraft::new();
                draft.abort(b"", operation(record as u64 + 1), position);
                let _ = self.producer.publish(&draft);
            }
        }
    }

    fn assert_held(&self) {
        let leases = self.producer.leases();
        for record in 0..self.positions.len() {
            if self.told.iter().all(|rank| rank[record]) {
                continue;
            }
            let block = record as u32 + 1;
            assert!(
                leases.source_leases(GroupId(0), SourceBlock(block)) > 0,
                "block {block} is free early"
            );
            assert!(
                leases.device_leases(GroupId(0), PhysicalBlock(block)) > 0,
                "block {block} is free early"
            );
        }
    }

    fn end(mut self) {
        for rank in 0..RANKS {
            self.producer.lose(Rank(rank));
        }
        self.producer.poll_thorough();
        while self.producer.next_completion().is_some() {}
        assert_eq!(
            (self.producer.in_flight(), self.producer.leases().leased_blocks()),
            (0, 0)
        );
    }
}
