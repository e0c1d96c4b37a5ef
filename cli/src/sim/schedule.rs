//! The one scheduler: from a seed, which process does what next, and what befalls it.
//!
//! Time is cut into spells with a climate of their own. At the end of a spell nothing new happens until everything has
//! ended, and the account must be balanced.

use super::model::{Violation, check};
use super::seat::WATCHDOG_NS;
use super::world::World;

/// Steps that a pause may take before it counts as stuck.
const PAUSE_STEPS: u64 = 400_000;

/// What befalls processes, in one spell. Chances are in parts of 65,536 per step.
#[derive(Clone, Copy, Debug)]
struct Climate {
    until: u64,
    producer_deaths: u16,
    worker_deaths: u16,
    stops: u16,
    hostile: u16,
    aborts: u16,
    resets: u16,
    /// Chance of 256 that a workload step asks for something.
    publish: u8,
    /// Chance of 256 that what was asked for is flushed at once.
    flush: u8,
}

/// A simulation that runs.
pub(super) struct Schedule {
    pub(super) world: World,
    climate: Climate,
}

impl Schedule {
    pub(super) fn new(seed: u64, ranks: Option<u32>) -> anyhow::Result<Self> {
        let ranks = ranks.unwrap_or(1 + (seed % 8) as u32 % 5 + (seed % 3) as u32);
        let mut world = World::new(seed, ranks)?;
        let climate = Self::draw(&mut world);
        Ok(Self { world, climate })
    }

    fn draw(world: &mut World) -> Climate {
        let random = &mut world.random;
        let mut rare = |most: u16| if random.bool() { 0 } else { random.u16(0..most) };
        let mut climate = Climate {
            until: 0,
            producer_deaths: rare(200),
            worker_deaths: rare(150),
            stops: rare(200),
            hostile: rare(60),
            aborts: rare(900),
            resets: rare(60),
            publish: 0,
            flush: 0,
        };
        let faulty = rare(100);
        world.faulty = faulty > 60;
        let random = &mut world.random;
        climate.until = world.history.step + random.u64(200..6_000);
        climate.publish = random.u8(20..=255);
        climate.flush = random.u8(60..=255);
        climate
    }

    fn chance(&mut self, of_65536: u16) -> bool {
        of_65536 > 0 && self.world.random.u16(..) < of_65536
    }

    fn rank(&mut self) -> u32 {
        let ranks = self.world.ranks();
        self.world.random.u32(0..ranks)
    }

    fn tick(&mut self) {
        self.world.history.step += 1;
        self.world.now_ns += self.world.random.u64(1..500);
    }

    /// One step.
    pub(super) fn step(&mut self) -> Result<(), Violation> {
        if self.world.history.step >= self.climate.until {
            self.pause()?;
            self.climate = Self::draw(&mut self.world);
        }
        self.tick();
        self.befall()?;
        let rank = self.rank();
        match self.world.random.u8(..) {
            0..70 => self.world.step_worker(rank).map(|_| ()),
            70..160 => {
                self.world.step_device(rank);
                Ok(())
            }
            160..190 => self.world.poll(false),
            190..222 => {
                if self.world.random.u8(..) <= self.climate.publish {
                    self.world.publish()?;
                }
                if self.world.random.u8(..) <= self.climate.flush {
                    self.world.flush()?;
                }
                Ok(())
            }
            222..226 => self.world.flush(),
            226..232 => {
                self.world.shake_hands(rank);
                Ok(())
            }
            232..240 => {
                self.world.launch(rank);
                Ok(())
            }
            240..243 => self.world.reset_where_due(),
            243..245 => {
                self.world.repeat_answer(rank);
                Ok(())
            }
            245..=255 => self.world.refill(),
        }
    }

    fn befall(&mut self) -> Result<(), Violation> {
        let climate = self.climate;
        if !self.world.has_producer() {
            if self.chance(1500) {
                self.world.take_over()?;
            }
        } else if self.chance(climate.producer_deaths) {
            match self.world.random.bool() {
                true => {
                    let stores = self.world.random.u64(0..80);
                    self.world.arm_producer(stores);
                }
                false => self.world.producer_died()?,
            }
        }
        let rank = self.rank();
        if self.chance(climate.worker_deaths) {
            match self.world.random.bool() {
                true => {
                    let stores = self.world.random.u64(0..30);
                    self.world.arm_worker(rank, stores);
                }
                false => self.world.kill(rank),
            }
        }
        if self.chance(climate.stops) {
            let steps = self.world.random.u64(10..3_000);
            self.world.stop(rank, steps);
        }
        if self.chance(climate.hostile) {
            self.world.scribble(rank);
        }
        if self.chance(climate.aborts) {
            self.world.abort()?;
        }
        if self.chance(climate.resets) {
            self.world.reset()?;
        }
        if self.chance(1200) {
            self.world.lose(rank)?;
        }
        if self.chance(1600) {
            self.world.join(rank)?;
        }
        if self.chance(200) && !self.world.model.is_sound(rank) {
            self.world.kill(rank); // expelled
        }
        Ok(())
    }

    /// Nothing new happens until everything has ended.
    fn pause(&mut self) -> Result<(), Violation> {
        self.world.calm();
        self.world.history.add("a pause begins", 0, 0);
        let began = self.world.history.step;
        loop {
            self.tick();
            let mut worked = false;
            for rank in 0..self.world.ranks() {
                self.tick();
                worked |= self.world.step_worker(rank)?;
                self.tick();
                worked |= self.world.step_device(rank);
            }
            if !worked && self.world.is_settled()? {
                break;
            }
            if !worked {
                self.world.now_ns += WATCHDOG_NS / 8; // an event that never fires is given up
            }
            let steps = self.world.history.step - began;
            check(
                steps < PAUSE_STEPS,
                "X17 everything ends once nothing new happens",
                || self.world.stuck(),
            )?;
        }
        self.world.history.add("a pause ends", 0, 0);
        self.world.check_settled()
    }
}
