//! Readers against a stepped device: what attention reads is one writer's bytes, whatever the schedule.

use std::sync::{Arc, Mutex};

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::planted::with_planted;

use super::*;
use crate::device::adversary::Adversary;
use crate::device::host::tests::{Segment, small};
use crate::device::host::{HostDevice, HostEngine, KernelMemory, KernelState, Step, Stepper};
use crate::device::{Access, Fragment, RegionId};

const BLOCKS: u32 = 4;
/// Bytes of one block of one layer: 4 tokens of 4 four-byte elements.
const BYTES: u64 = 64;
const GROUP: GroupId = GroupId(0);
const TURN: usize = 16;

fn map() -> GeometryMap {
    let layer = "[[layers]]\ngroup = 0\nkv = { latent = { width = 4 } }\n";
    let group = format!("[[groups]]\nblock_tokens = 4\nsource_blocks = 255\ndevice_blocks = {BLOCKS}\n");
    let text = format!("model = \"t\"\ndtype = \"f32\"\nranks = 1\n{group}{layer}{layer}");
    GeometryMap::new(&Geometry::from_toml(&text).unwrap()).unwrap()
}

/// A device, its engine, and a host segment whose block n is full of n.
struct Bench {
    device: HostDevice,
    stepper: Stepper,
    engine: HostEngine,
    region: RegionId,
    readers: Readers,
    map: GeometryMap,
    _segment: Segment,
}

impl Bench {
    fn new(adversary: Adversary) -> Self {
        let map = map();
        let segment = Segment::new(255 * BYTES as usize);
        (0..255).for_each(|n| segment.fill(n * BYTES as usize, BYTES as usize, n as u8));
        let spec = small(map.device_bytes());
        let mut device = HostDevice::stepped(spec, adversary).unwrap();
        let region = device
            .register_all(segment.span(Access::ReadOnly), &[255 * BYTES])
            .unwrap();
        let (stepper, engine) = (device.stepper(), device.engine());
        Self {
            readers: Readers::new(&map, 8),
            device,
            stepper,
            engine,
            region,
            map,
            _segment: segment,
        }
    }

    fn at(&self, layer: u32, block: u32) -> u64 {
        self.map.planes(kvsluice_layout::ids::Rank(0), DecoderLayer(layer))[0].device_at(PhysicalBlock(block).into())
    }

    fn start(&mut self, id: WriterId, block: u32) -> Result<(), StartError> {
        let destinations = [(GROUP, PhysicalBlock(block))];
        self.readers
            .start(&mut self.device, Queue::CopyIn, id, destinations.into_iter())
    }

    /// Submits the copies of `layer`: `block` gets the bytes `value`.
    fn copy(&mut self, id: WriterId, layer: u32, block: u32, value: u8) {
        let (host, device) = (u64::from(value) * BYTES, self.at(layer, block));
        let fragment = Fragment::Upload {
            region: self.region,
            host,
            device,
            bytes: BYTES,
        };
        self.device.submit(Queue::CopyIn, &[fragment]).unwrap();
        let event = self.device.record(Queue::CopyIn).unwrap();
        self.readers.layer_ready(id, DecoderLayer(layer), event).unwrap();
    }

    /// Launches a kernel that reads `block` in turns.
    fn attend(&self, layer: u32, block: u32) -> Arc<Mutex<Vec<u8>>> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (out, at) = (Arc::clone(&seen), self.at(layer, block));
        let kernel = move |memory: &KernelMemory<'_>| {
            let mut out = out.lock().unwrap();
            let mut bytes = [0; TURN];
            memory.read(at + out.len() as u64, &mut bytes).unwrap();
            out.extend(bytes);
            if out.len() as u64 == BYTES {
                KernelState::Finished
            } else {
                KernelState::Again
            }
        };
        self.engine.launch(kernel).unwrap();
        seen
    }
}

fn all(seen: &Mutex<Vec<u8>>, value: u8) -> bool {
    *seen.lock().unwrap() == [value; BYTES as usize]
}

#[test]
fn x18_layer_0_runs_while_layer_1_still_loads() {
    let mut bench = Bench::new(Adversary::default());
    let id = bench.readers.open().unwrap();
    bench.start(id, 1).unwrap();
    let ready = |bench: &mut Bench, layer| bench.readers.wait_layer(&mut bench.device, id, DecoderLayer(layer));
    assert_eq!(
        ready(&mut bench, 0),
        Err(ReadError::NotReady {
            writer: id,
            layer: DecoderLayer(0)
        })
    );
    bench.copy(id, 0, 1, 50);
    bench.stepper.step_queue(Queue::Compute); // the fence
    while bench.stepper.step_queue(Queue::CopyIn) == Step::Worked {}
    bench.copy(id, 1, 1, 51);
    ready(&mut bench, 0).unwrap();
    let first = bench.attend(0, 1);
    ready(&mut bench, 1).unwrap();
    let second = bench.attend(1, 1);
    while bench.stepper.step_queue(Queue::Compute) == Step::Worked {}
    assert!(all(&first, 50), "layer 0 is attended");
    assert!(second.lock().unwrap().is_empty(), "layer 1 is still waited for");
    bench.stepper.run();
    assert!(all(&second, 51));
}

#[test]
fn x19_layer_events_are_refused_until_the_fence_is_recorded() {
    let refused = || {
        let mut bench = Bench::new(Adversary::default());
        let id = bench.readers.open().unwrap();
        bench.copy(id, 0, 1, 50);
        let early = bench.readers.wait_layer(&mut bench.device, id, DecoderLayer(0));
        early == Err(ReadError::NotFenced { writer: id })
    };
    assert!(refused());
    assert!(!with_planted("hand_out_before_fence", refused));
}

#[test]
fn x18_a_block_that_is_read_is_not_overwritten_until_its_reader_has_passed() {
    let mut bench = Bench::new(Adversary::default());
    let first = bench.readers.open().unwrap();
    bench.start(first, 2).unwrap();
    bench.copy(first, 0, 2, 60);
    bench
        .readers
        .wait_layer(&mut bench.device, first, DecoderLayer(0))
        .unwrap();
    bench.readers.retire(&mut bench.device, first);
    let stale = bench.readers.wait_layer(&mut bench.device, first, DecoderLayer(0));
    assert_eq!(stale, Err(ReadError::Unknown { writer: first }));
    let second = bench.readers.open().unwrap();
    let held = StartError::Held {
        group: GROUP,
        block: PhysicalBlock(2),
        reader: first,
    };
    assert_eq!(bench.start(second, 2), Err(held));
    assert_eq!(bench.start(second, 3), Ok(()), "another block is free");
    let seen = bench.attend(0, 2);
    bench.readers.end_read(&mut bench.device, first).unwrap();
    let twice = bench.readers.end_read(&mut bench.device, first);
    assert_eq!(twice, Err(EndReadError::NotReading { writer: first }));
    bench.start(second, 2).unwrap();
    bench.copy(second, 0, 2, 61);
    assert!(bench.readers.is_read(first) && bench.readers.any_read());
    bench.stepper.run();
    assert!(all(&seen, 60));
    bench.readers.sweep(&mut bench.device);
    assert!(!bench.readers.is_read(first) && !bench.readers.any_read());
    bench.readers.retire(&mut bench.device, second);
    assert_eq!(bench.readers.free.len(), 8);
}

#[test]
fn d6_field_15_a_write_back_reads_what_compute_has_finished() {
    let written = |fenced: bool| {
        let mut bench = Bench::new(Adversary::default());
        let area = Segment::new(BYTES as usize);
        let region = bench
            .device
            .register_all(area.span(Access::ReadWrite), &[BYTES])
            .unwrap();
        let (device, mut turns) = (bench.at(0, 0), 0);
        let compute = move |memory: &KernelMemory<'_>| {
            memory.write(device + turns * TURN as u64, &[9; TURN]).unwrap();
            turns += 1;
            if turns * TURN as u64 == BYTES {
                KernelState::Finished
            } else {
                KernelState::Again
            }
        };
        bench.engine.launch(compute).unwrap();
        if fenced {
            after_compute(&mut bench.device, Queue::CopyOut).unwrap();
        }
        let fragment = Fragment::WriteBack {
            region,
            host: 0,
            device,
            bytes: BYTES,
        };
        bench.device.submit(Queue::CopyOut, &[fragment]).unwrap();
        bench.stepper.step_queue(Queue::Compute);
        while bench.stepper.step_queue(Queue::CopyOut) == Step::Worked {}
        bench.stepper.run();
        let bytes = area.bytes(0, BYTES as usize);
        drop(bench);
        bytes == [9; BYTES as usize]
    };
    assert!(written(true));
    assert!(!written(false), "a write-back ahead of compute goes unnoticed");
}

/// Writers and readers on few blocks under a seed. True where every reader saw one writer's bytes.
fn readers_see_their_writer(seed: u64) -> bool {
    let mut bench = Bench::new(Adversary::late(seed));
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut open: Vec<(WriterId, u32, u8, Event)> = Vec::new();
    let mut reads: Vec<(WriterId, u32, u8)> = Vec::new();
    let mut seen = Vec::new();
    let mut value = 0;
    for _ in 0..120 {
        match rng.u8(0..8) {
            0 | 1 if value < 250 => {
                let block = rng.u32(0..BLOCKS);
                // The lease: one operation at a time writes a block (X9).
                if open.iter().any(|&(_, of, ..)| of == block) {
                    continue;
                }
                let Ok(id) = bench.readers.open() else { continue };
                value += 1;
                if bench.start(id, block).is_err() {
                    bench.readers.retire(&mut bench.device, id);
                    continue;
                }
                bench.copy(id, 0, block, value);
                open.push((
                    id,
                    block,
                    value,
                    bench.readers.layer_event(id, DecoderLayer(0)).unwrap(),
                ));
            }
            2 | 3 if !open.is_empty() => {
                let (id, block, value, _) = open[rng.usize(0..open.len())];
                bench
                    .readers
                    .wait_layer(&mut bench.device, id, DecoderLayer(0))
                    .unwrap();
                reads.push((id, block, value));
            }
            4 if !reads.is_empty() => {
                let (id, block, value) = reads.swap_remove(rng.usize(0..reads.len()));
                seen.push((bench.attend(0, block), value));
                bench.readers.end_read(&mut bench.device, id).unwrap();
            }
            5 => {
                let device = &mut bench.device;
                let done = |&(.., event): &(_, _, _, Event)| device.poll(event) == EventState::Done;
                if let Some(at) = open.iter().position(done) {
                    let (id, ..) = open.swap_remove(at);
                    bench.readers.retire(&mut bench.device, id);
                }
            }
            6 => bench.readers.sweep(&mut bench.device),
            _ => (0..rng.u8(0..30)).for_each(|_| {
                bench.stepper.step();
            }),
        }
    }
    for (id, block, value) in reads.drain(..) {
        seen.push((bench.attend(0, block), value));
        bench.readers.end_read(&mut bench.device, id).unwrap();
    }
    assert_eq!(
        bench.stepper.run(),
        Step::Idle,
        "seed {seed}: the queues wait for each other"
    );
    open.drain(..)
        .for_each(|(id, ..)| bench.readers.retire(&mut bench.device, id));
    bench.readers.sweep(&mut bench.device);
    assert_eq!(bench.readers.free.len(), 8, "seed {seed}: a writer is left behind");
    seen.iter().all(|(seen, value)| all(seen, *value))
}

#[test]
fn x18_x19_every_reader_sees_the_bytes_of_its_writer_under_every_schedule() {
    let seeds = if cfg!(miri) { 0..3 } else { 0..50 };
    for seed in seeds.clone() {
        assert!(readers_see_their_writer(seed), "seed {seed}");
    }
    if cfg!(miri) {
        return;
    }
    for fault in ["no_reader_fence", "overwrite_open_reads"] {
        let survived = with_planted(fault, || seeds.clone().all(readers_see_their_writer));
        assert!(!survived, "{fault} goes unnoticed");
    }
}
