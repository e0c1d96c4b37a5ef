//! What happens to the workers of a channel.

use anyhow::Context;
use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::record::TerminalSlot;
use kvsluice_layout::region::{SLOTS_AT, TERMINALS_AT, WORKER_EPOCH_AT};
use kvsluice_transport::shared::{Shared, SharedMut};
use zerocopy::IntoBytes;

use super::{Place, World};
use crate::sim::memory::Probe;
use crate::sim::model::{Violation, check};
use crate::sim::seat::{Birth, Nature, Seat, Stepped};

/// Most pieces of work that a device does in one step.
const DEVICE_PIECES: u32 = 10;

impl World {
    pub(super) fn set(&mut self, rank: u32, place: Place) {
        if let Some(to) = self.places.get_mut(rank as usize) {
            *to = place;
        }
    }

    pub(super) fn observe_rank(&mut self, rank: u32) -> Result<(), Violation> {
        let Some(Place::Alive(seat)) = self.places.get(rank as usize) else {
            return Ok(());
        };
        seat.segment.take_log(&mut self.log);
        self.model.rank_stored(rank, seat.epoch.0, &self.log)?;
        if self.model.is_sound(rank) {
            seat.unharmed()?;
        }
        Ok(())
    }

    /// One step of a rank's worker. True where it did something.
    pub(in crate::sim) fn step_worker(&mut self, rank: u32) -> Result<bool, Violation> {
        let (now_ns, step) = (self.now_ns, self.history.step);
        let Some(seat) = self.seat_mut(rank).filter(|seat| seat.stopped_until <= step) else {
            return Ok(false);
        };
        let generation = seat.tables().generation();
        let stepped = seat.step(now_ns);
        self.observe_rank(rank)?;
        let Some(seat) = self.seat(rank) else { return Ok(false) };
        if seat.tables().generation() != generation && self.model.is_sound(rank) {
            seat.has_only_its_generation()?;
        }
        match stepped {
            Stepped::Alive(step) => {
                if step == kvsluice_gpu_worker::worker::Step::Worked {
                    self.history
                        .add("worked", u64::from(rank), seat.open_operations() as u64);
                }
                Ok(step == kvsluice_gpu_worker::worker::Step::Worked)
            }
            Stepped::Crashed => {
                self.kill(rank);
                Ok(true)
            }
            Stepped::Stopped { broken } => {
                let sound = self.model.is_sound(rank);
                check(!broken || !sound, "X9 a whole ring is never broken", || {
                    format!("rank {rank}")
                })?;
                self.kill(rank);
                Ok(true)
            }
        }
    }

    pub(in crate::sim) fn step_device(&mut self, rank: u32) -> bool {
        let pieces = self.random.u32(1..=DEVICE_PIECES);
        self.seat_mut(rank).is_some_and(|seat| seat.step_device(pieces))
    }

    pub(in crate::sim) fn shake_hands(&mut self, rank: u32) -> bool {
        self.seat_mut(rank).is_some_and(Seat::shake_hands)
    }

    pub(in crate::sim) fn launch(&mut self, rank: u32) {
        let mut random = self.random.fork();
        if let Some(seat) = self.seat(rank) {
            seat.launch_reader(&self.shape, &mut random);
        }
    }

    /// The process of a rank ends here. Its device goes with it: what was queued is never copied.
    pub(in crate::sim) fn kill(&mut self, rank: u32) {
        if self.seat(rank).is_some() {
            self.tally.worker_deaths += 1;
            self.history.add("a worker dies", u64::from(rank), 0);
            self.set(rank, Place::Dead);
        }
    }

    /// Lets a rank's worker make so many more stores.
    pub(in crate::sim) fn arm_worker(&mut self, rank: u32, stores: u64) {
        if let Some(seat) = self.seat(rank) {
            seat.segment.fuse().arm(stores);
        }
    }

    /// Stops a rank's process for so many steps, as SIGSTOP does.
    pub(in crate::sim) fn stop(&mut self, rank: u32, steps: u64) {
        let until = self.history.step + steps;
        if let Some(seat) = self.seat_mut(rank) {
            seat.stopped_until = until;
        }
    }

    /// Lets every process run and live.
    pub(in crate::sim) fn calm(&mut self) {
        self.control.fuse().disarm();
        for place in &mut self.places {
            if let Place::Alive(seat) = place {
                seat.stopped_until = 0;
                seat.segment.fuse().disarm();
            }
        }
    }

    /// The producer has proof of a worker's death, and takes it off its rank.
    pub(in crate::sim) fn lose(&mut self, rank: u32) -> Result<(), Violation> {
        if !matches!(self.places.get(rank as usize), Some(Place::Dead)) || self.producer.is_none() {
            return Ok(());
        }
        self.history.add("a rank is lost", u64::from(rank), 0);
        self.model.lost(rank);
        self.set(rank, Place::Empty);
        self.produce(false, |producer| producer.lose(Rank(rank)))?;
        self.take_completions()
    }

    /// A worker starts and joins an empty rank.
    pub(in crate::sim) fn join(&mut self, rank: u32) -> Result<(), Violation> {
        let Some(process) = &self.producer else { return Ok(()) };
        if !matches!(self.places.get(rank as usize), Some(Place::Empty)) {
            return Ok(());
        }
        let producer = process.producer.epoch();
        let epoch = self.epoch();
        let lines = SLOTS_AT..SLOTS_AT + self.shape.regions.ring_bytes();
        let segment = Probe::new(self.shape.regions.rank_bytes(), lines);
        let heap = segment.heap().clone();
        let first = self.produce(true, |producer| producer.join(Rank(rank), heap, epoch, 100 + rank))?;
        let Some(first) = first else { return Ok(()) };
        self.tally.joins += 1;
        self.history.add("a worker joins", u64::from(rank), first.0);
        let nature = Nature::draw(&mut self.random, self.faulty);
        self.model.joined(rank, epoch.0, first.0, nature.is_faulty())?;
        let seat = self.born(rank, epoch, producer, first, segment, &nature);
        let seat = seat.map_err(|error| Violation {
            rule: "simulator: a worker starts",
            what: format!("{error:#}"),
        })?;
        self.set(rank, Place::Alive(Box::new(seat)));
        self.observe_rank(rank)
    }

    pub(super) fn born(
        &self,
        rank: u32,
        epoch: ProcessEpoch,
        producer: ProcessEpoch,
        first: Position,
        segment: Probe,
        nature: &Nature,
    ) -> anyhow::Result<Seat> {
        let birth = Birth {
            shape: &self.shape,
            control: self.control.heap().clone(),
            pool: self.pool.memory.clone(),
            segment,
            rank,
            epoch,
            producer,
            first,
        };
        Seat::new(birth, nature).with_context(|| format!("rank {rank}"))
    }

    /// A worker answers once more what it has answered, and says so in its hint (X16).
    pub(in crate::sim) fn repeat_answer(&mut self, rank: u32) {
        let lines = self.shape.regions.ring_bytes() / 64;
        let at = SLOTS_AT + self.random.usize(0..lines) * 64;
        if let Some(seat) = self.seat(rank) {
            let heap = seat.segment.heap();
            let mut line = [0; 8];
            heap.copy_out(at, &mut line);
            heap.copy_in(at, &line);
            heap.store(TERMINALS_AT, heap.load(TERMINALS_AT).wrapping_add(1));
        }
    }

    /// Hostile words in a rank's segment: anywhere, or in the slots of records in flight, whole answers among them.
    pub(in crate::sim) fn scribble(&mut self, rank: u32) {
        let Some(seat) = self.seat(rank) else { return };
        let (heap, epoch) = (seat.segment.heap().clone(), seat.epoch.0);
        self.tally.scribbles += 1;
        self.history.add("hostile words", u64::from(rank), 0);
        self.model.scribbled(rank);
        let open: Vec<u64> = self.model.open_data().collect();
        for _ in 0..self.random.u8(1..12) {
            let position = open.get(self.random.usize(0..open.len().max(1)));
            match (self.random.u8(0..3), position) {
                (0, _) | (_, None) => {
                    let words = (heap.size() - WORKER_EPOCH_AT) / 8;
                    let at = WORKER_EPOCH_AT + self.random.usize(0..words) * 8;
                    heap.store(at, self.random.u64(..));
                }
                (kind, Some(position)) => {
                    let at = SLOTS_AT + *position as usize % self.shape.regions.ring_bytes();
                    let mut slot = TerminalSlot {
                        commit: position + 1,
                        status: self.random.u8(0..7),
                        bytes_moved: self.random.u64(..),
                        ..TerminalSlot::default()
                    };
                    if kind == 1 {
                        // Nearly what an honest worker says.
                        let ring = self.shape.regions.ring_at() + *position as usize % self.shape.regions.ring_bytes();
                        slot.identity = self.control.heap().load(ring + 8);
                        slot.producer_epoch = self.control.heap().load(ring + 32);
                        slot.worker_epoch = epoch;
                    }
                    let mut line = [0_u64; 8];
                    line.as_mut_bytes().copy_from_slice(slot.as_bytes());
                    heap.copy_in(at, &line);
                }
            }
        }
    }
}
