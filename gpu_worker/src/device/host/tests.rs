//! The promises of the host device, and the faults that the adversary must not let pass.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::{Arc, Mutex as StdMutex};

use kvsluice_layout::planted::with_planted;

use super::*;
use crate::device::adversary::Fault;
use crate::device::{Access, TABLE_POISON};

mod memory;

const SEEDS: u64 = if cfg!(miri) { 3 } else { 40 };
const TABLES: TableSpec = TableSpec { slots: 2, words: 8 };

/// Host memory as a peer's segment would be: raw, without references.
pub(crate) struct Segment {
    base: *mut u8,
    layout: Layout,
}

impl Segment {
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 64).unwrap();
        // SAFETY: the size is not 0 in any test.
        let base = unsafe { alloc_zeroed(layout) };
        Self { base, layout }
    }

    pub(crate) fn span(&self, access: Access) -> HostSpan {
        // SAFETY: every test drops its device before its segments.
        unsafe { HostSpan::new(self.base, self.layout.size() as u64, access) }
    }

    pub(crate) fn fill(&self, offset: usize, bytes: usize, value: u8) {
        assert!(offset + bytes <= self.layout.size());
        // SAFETY: in bounds, checked above.
        unsafe { std::ptr::write_bytes(self.base.add(offset), value, bytes) };
    }

    pub(crate) fn bytes(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.layout.size());
        // SAFETY: in bounds, checked above.
        (offset..offset + bytes)
            .map(|at| unsafe { self.base.add(at).read() })
            .collect()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) }
    }
}

/// A spec that is quick to open, also under Miri.
pub(crate) fn small(pool_bytes: u64) -> DeviceSpec {
    let spec = DeviceSpec::allocate(pool_bytes, TABLES);
    DeviceSpec {
        events_max: 128,
        fragments_max: 512,
        commands_max: 512,
        ..spec
    }
}

/// A stepped device with one writable region over all of `segment`.
fn stepped(pool_bytes: u64, segment: &Segment, adversary: Adversary) -> (HostDevice, Stepper, RegionId) {
    let mut device = HostDevice::stepped(small(pool_bytes), adversary).unwrap();
    let span = segment.span(Access::ReadWrite);
    let ends = [span.bytes()];
    let region = device.register_all(span, &ends).unwrap();
    let stepper = device.stepper();
    (device, stepper, region)
}

fn upload(region: RegionId, host: u64, device: u64, bytes: u64) -> Fragment {
    Fragment::Upload {
        region,
        host,
        device,
        bytes,
    }
}

fn write_back(region: RegionId, host: u64, device: u64, bytes: u64) -> Fragment {
    Fragment::WriteBack {
        region,
        host,
        device,
        bytes,
    }
}

/// Polls until the event is no longer pending, stepping as a simulator would.
fn settle(device: &mut HostDevice, stepper: &mut Stepper, event: Event) -> EventState {
    while device.poll(event) == EventState::Pending {
        assert_ne!(stepper.step(), Step::Idle, "the event is pending and nothing is queued");
    }
    device.poll(event)
}

#[test]
fn d2_a_copy_runs_later_than_its_submit_and_before_its_event() {
    let segment = Segment::new(256);
    let (mut device, mut stepper, region) = stepped(128, &segment, Adversary::default());
    segment.fill(0, 64, 7);
    device.submit(Queue::CopyIn, &[upload(region, 0, 0, 64)]).unwrap();
    device.submit(Queue::CopyIn, &[write_back(region, 128, 0, 64)]).unwrap();
    let event = device.record(Queue::CopyIn).unwrap();
    assert_eq!(device.poll(event), EventState::Pending);
    assert_eq!(segment.bytes(128, 64), vec![0; 64], "nothing runs inside submit");
    assert_eq!(settle(&mut device, &mut stepper, event), EventState::Done);
    assert_eq!(segment.bytes(128, 64), vec![7; 64]);
    device.release(event);
    assert_eq!(device.poll(event), EventState::Failed, "a stale handle is never Done");
}

/// Many blocks up, moved, and back, through `device` with events across all queues; true where every byte arrived.
fn round_trip(device: &mut HostDevice, region: RegionId, segment: &Segment, mut step: impl FnMut()) -> bool {
    const BLOCKS: u64 = 8;
    const BYTES: u64 = 96;
    for block in 0..BLOCKS {
        segment.fill((block * BYTES) as usize, BYTES as usize, block as u8 + 1);
    }
    let each = |make: &dyn Fn(u64) -> Fragment| (0..BLOCKS).map(make).collect::<Vec<_>>();
    device
        .submit(Queue::CopyIn, &each(&|b| upload(region, b * BYTES, b * BYTES, BYTES)))
        .unwrap();
    let loaded = device.record(Queue::CopyIn).unwrap();
    device.wait(Queue::Compute, loaded).unwrap();
    let reversed = |b: u64| (BLOCKS + BLOCKS - 1 - b) * BYTES;
    let moves = each(&|b| Fragment::Move {
        from: b * BYTES,
        to: reversed(b),
        bytes: BYTES,
    });
    device.submit(Queue::Compute, &moves).unwrap();
    let moved = device.record(Queue::Compute).unwrap();
    device.wait(Queue::CopyOut, moved).unwrap();
    let back = each(&|b| write_back(region, (BLOCKS + b) * BYTES, (BLOCKS + b) * BYTES, BYTES));
    device.submit(Queue::CopyOut, &back).unwrap();
    let done = device.record(Queue::CopyOut).unwrap();
    while device.poll(done) == EventState::Pending {
        step();
    }
    let events = [loaded, moved, done];
    let all_done = events.iter().all(|&event| device.poll(event) == EventState::Done);
    events.into_iter().for_each(|event| device.release(event));
    all_done
        && (0..BLOCKS).all(|b| segment.bytes(((2 * BLOCKS - 1 - b) * BYTES) as usize, 1) == [b as u8 + 1])
        && (0..BLOCKS).all(|b| {
            let row = segment.bytes(((BLOCKS + b) * BYTES) as usize, BYTES as usize);
            row.iter().all(|&byte| byte == (BLOCKS - b) as u8)
        })
}

#[test]
fn d2_bytes_arrive_through_every_queue_under_every_seed() {
    for seed in 0..SEEDS {
        let segment = Segment::new(2048);
        let (mut device, mut stepper, region) = stepped(2048, &segment, Adversary::late(seed));
        let arrived = round_trip(&mut device, region, &segment, || {
            assert_ne!(stepper.step(), Step::Blocked)
        });
        assert!(arrived, "seed {seed}");
    }
}

#[test]
fn d2_bytes_arrive_on_copy_threads() {
    let seeds = if cfg!(miri) { 0..1 } else { 0..6 };
    for (seed, threads) in seeds.flat_map(|seed| [(seed, 1), (seed, 3)]) {
        for adversary in [Adversary::default(), Adversary::late(seed)] {
            let segment = Segment::new(2048);
            let mut device = HostDevice::open(small(2048), threads, adversary).unwrap();
            let region = device.register_all(segment.span(Access::ReadWrite), &[2048]).unwrap();
            for _ in 0..if cfg!(miri) { 1 } else { 4 } {
                assert!(
                    round_trip(&mut device, region, &segment, std::thread::yield_now),
                    "seed {seed}, {threads}"
                );
            }
            drop(device);
        }
    }
}

#[test]
fn d2_events_of_a_queue_complete_in_its_order() {
    for seed in 0..SEEDS {
        let segment = Segment::new(1024);
        let (mut device, mut stepper, region) = stepped(1024, &segment, Adversary::late(seed));
        let events: Vec<_> = (0..6)
            .map(|n| {
                let queue = Queue::ALL[n % 2];
                device
                    .submit(queue, &[upload(region, n as u64 * 100, n as u64 * 100, 100)])
                    .unwrap();
                (queue, device.record(queue).unwrap())
            })
            .collect();
        loop {
            for queue in Queue::ALL {
                let states: Vec<_> = events
                    .iter()
                    .filter(|(on, _)| *on == queue)
                    .map(|(_, e)| device.shared.states.poll(*e))
                    .collect();
                let done = states.iter().take_while(|&&state| state == EventState::Done).count();
                let later = states
                    .iter()
                    .skip(done)
                    .filter(|&&state| state == EventState::Done)
                    .count();
                assert_eq!(later, 0, "seed {seed}: {queue:?} {states:?}");
            }
            if stepper.step() == Step::Idle {
                break;
            }
        }
    }
}

/// Uploads a block, reuses its source, and says whether the device has the bytes of before. The source is reused after
/// the event as it must be, or right after the enqueue.
fn source_survives(seed: u64, reuse_early: bool) -> bool {
    let segment = Segment::new(512);
    let (mut device, mut stepper, region) = stepped(256, &segment, Adversary::late(seed));
    segment.fill(0, 256, 1);
    device.submit(Queue::CopyIn, &[upload(region, 0, 0, 256)]).unwrap();
    let event = device.record(Queue::CopyIn).unwrap();
    if !reuse_early {
        settle(&mut device, &mut stepper, event);
    }
    segment.fill(0, 256, 2);
    settle(&mut device, &mut stepper, event);
    device
        .submit(Queue::CopyOut, &[write_back(region, 256, 0, 256)])
        .unwrap();
    stepper.run();
    segment.bytes(256, 256) == vec![1; 256]
}

#[test]
fn d2_field_13_a_source_that_is_reused_early_is_always_caught() {
    for seed in 0..SEEDS {
        assert!(source_survives(seed, false), "seed {seed}");
        assert!(
            !source_survives(seed, true),
            "seed {seed}: an early release went unnoticed"
        );
    }
}

/// Attention reads a block on the compute queue while an upload overwrites it. True where attention saw one version.
fn live_block_survives(seed: u64, fenced: bool) -> bool {
    let segment = Segment::new(256);
    segment.fill(0, 256, 2);
    let (mut device, mut stepper, region) = stepped(256, &segment, Adversary::late(seed));
    let seen = Arc::new(StdMutex::new(Vec::new()));
    let out = Arc::clone(&seen);
    let mut at = 0;
    let attention = move |memory: &KernelMemory<'_>| {
        let mut bytes = [0; 16];
        memory.read(at, &mut bytes).unwrap();
        out.lock().unwrap().extend(bytes);
        at += 16;
        if at < 256 {
            KernelState::Again
        } else {
            KernelState::Finished
        }
    };
    device.engine().launch(attention).unwrap();
    if fenced {
        let fence = device.record(Queue::Compute).unwrap();
        device.wait(Queue::CopyIn, fence).unwrap();
    }
    device.submit(Queue::CopyIn, &[upload(region, 0, 0, 256)]).unwrap();
    stepper.run();
    seen.lock().unwrap().iter().all(|&byte| byte == 0)
}

#[test]
fn x19_field_14_without_the_reader_fence_a_live_block_is_overwritten() {
    let survived = (0..SEEDS).filter(|&seed| live_block_survives(seed, false)).count() as u64;
    assert!(
        survived < SEEDS / 2 + 1,
        "the adversary hid a missing fence {survived} times of {SEEDS}"
    );
    for seed in 0..SEEDS {
        assert!(live_block_survives(seed, true), "seed {seed}");
    }
}

#[test]
fn x13_a_failed_copy_fails_its_event_and_every_queue_that_waited() {
    let run = || {
        let segment = Segment::new(256);
        let (mut device, mut stepper, region) = stepped(256, &segment, Adversary::late(5).with(1, Fault::FailCopy));
        let mut events = Vec::new();
        for n in 0..3 {
            device
                .submit(Queue::CopyIn, &[upload(region, n * 64, n * 64, 64)])
                .unwrap();
            events.push(device.record(Queue::CopyIn).unwrap());
        }
        device.wait(Queue::Compute, events[1]).unwrap();
        events.push(device.record(Queue::Compute).unwrap());
        stepper.run();
        assert_eq!(device.health(), Ok(()));
        events.iter().map(|&event| device.poll(event)).collect::<Vec<_>>()
    };
    use EventState::{Done, Failed};
    let right = vec![Done, Failed, Done, Failed];
    assert_eq!(run(), right);
    assert_ne!(
        with_planted("failure_as_success", run),
        right,
        "field bug 22 goes unnoticed"
    );
}

#[test]
fn d7_a_lost_device_fails_everything_unfinished_and_refuses_the_rest() {
    let segment = Segment::new(256);
    let (mut device, mut stepper, region) = stepped(256, &segment, Adversary::default().with(1, Fault::LoseDevice));
    device.submit(Queue::CopyIn, &[upload(region, 0, 0, 64)]).unwrap();
    let first = device.record(Queue::CopyIn).unwrap();
    assert_eq!(settle(&mut device, &mut stepper, first), EventState::Done);
    device.submit(Queue::CopyIn, &[upload(region, 0, 0, 64)]).unwrap();
    let second = device.record(Queue::CopyIn).unwrap();
    let third = device.record(Queue::CopyOut).unwrap();
    device.wait(Queue::CopyOut, second).unwrap();
    let fourth = device.record(Queue::CopyOut).unwrap();
    stepper.run();
    assert_eq!(device.poll(first), EventState::Done, "what was done stays done");
    assert_eq!(device.poll(third), EventState::Failed);
    assert_eq!([device.poll(second), device.poll(fourth)], [EventState::Failed; 2]);
    let lost = DeviceLost::Driver { code: 700 };
    assert_eq!(device.health(), Err(lost));
    assert_eq!(device.submit(Queue::CopyIn, &[]), Err(SubmitError::Lost(lost)));
    assert_eq!(device.record(Queue::CopyIn), Err(RecordError::Lost(lost)));
}

#[test]
fn d5_an_event_that_never_fires_ends_when_the_worker_gives_the_device_up() {
    let segment = Segment::new(64);
    let (mut device, mut stepper, _) = stepped(64, &segment, Adversary::default().with(0, Fault::MuteEvent));
    let mute = device.record(Queue::CopyIn).unwrap();
    let behind = device.record(Queue::CopyIn).unwrap();
    assert_eq!(stepper.run(), Step::Blocked);
    assert_eq!([device.poll(mute), device.poll(behind)], [EventState::Pending; 2]);
    device.condemn();
    assert_eq!([device.poll(mute), device.poll(behind)], [EventState::Failed; 2]);
    assert_eq!(device.health(), Err(DeviceLost::Condemned));
    assert_eq!(stepper.run(), Step::Idle);
}

/// Two swaps of one table while a replay reads it word by word, on the worst schedule. What the replay saw.
fn replay_during_swaps(fenced: bool) -> Vec<u32> {
    let segment = Segment::new(64);
    let (mut device, mut stepper, _) = stepped(64, &segment, Adversary::default());
    let slot = TableSlot(1);
    device.write_table(Queue::CopyIn, slot, &[1; 8]).unwrap();
    stepper.run();
    let seen = Arc::new(StdMutex::new(Vec::new()));
    let out = Arc::clone(&seen);
    let mut view = None;
    let replay = move |memory: &KernelMemory<'_>| {
        let view = *view.get_or_insert(memory.table(slot).unwrap());
        let mut out = out.lock().unwrap();
        let index = out.len() as u32;
        out.push(memory.word(view, index).unwrap());
        if index == 7 {
            KernelState::Finished
        } else {
            KernelState::Again
        }
    };
    device.engine().launch(replay).unwrap();
    let fence = device.record(Queue::Compute).unwrap();
    for value in 2..4 {
        stepper.step_queue(Queue::Compute);
        if fenced && value == 3 {
            device.wait(Queue::CopyIn, fence).unwrap(); // the buffer of value 1 may still be read
        }
        device.write_table(Queue::CopyIn, slot, &[value; 8]).unwrap();
        while stepper.step_queue(Queue::CopyIn) == Step::Worked {}
    }
    stepper.run();
    let seen = seen.lock().unwrap();
    seen.clone()
}

#[test]
fn d10_f15_a_replay_sees_the_whole_old_or_the_whole_new_table() {
    assert_eq!(replay_during_swaps(true), [1; 8]);
    assert_eq!(
        replay_during_swaps(false),
        [1, 1, 3, 3, 3, 3, 3, 3],
        "a buffer rewritten under its reader shows"
    );
    let in_place = with_planted("table_in_place", || replay_during_swaps(true));
    assert_ne!(
        in_place[0], in_place[7],
        "a table without a second buffer shows: {in_place:?}"
    );
}

#[test]
fn field_34_the_words_behind_a_table_are_poison() {
    let tail = || {
        let segment = Segment::new(64);
        let (mut device, mut stepper, _) = stepped(64, &segment, Adversary::default());
        let slot = TableSlot(0);
        for table in [[5; 8].as_slice(), &[6; 8], &[7; 3]] {
            device.write_table(Queue::CopyIn, slot, table).unwrap();
            assert_eq!(
                device.write_table(Queue::CopyIn, slot, table),
                Err(TableError::Busy { slot: 0 })
            );
            stepper.run();
        }
        let memory = KernelMemory::new(&device.shared);
        let view = memory.table(slot).unwrap();
        (0..8)
            .map(|index| memory.word(view, index).unwrap())
            .collect::<Vec<_>>()
    };
    let right = [[7; 3].as_slice(), &[TABLE_POISON; 5]].concat();
    assert_eq!(tail(), right);
    assert_ne!(with_planted("stale_table_tail", tail), right);
}

#[test]
fn d1_full_queues_and_event_tables_refuse_without_effect() {
    let segment = Segment::new(64);
    let spec = DeviceSpec {
        events_max: 1,
        fragments_max: 2,
        commands_max: 2,
        ..small(64)
    };
    let mut device = HostDevice::stepped(spec, Adversary::default()).unwrap();
    let region = device.register_all(segment.span(Access::ReadOnly), &[64]).unwrap();
    let one = upload(region, 0, 0, 8);
    let queue = Queue::CopyIn;
    assert_eq!(
        device.submit(queue, &[one; 3]),
        Err(SubmitError::Full {
            queue,
            needed: 3,
            free: 2
        })
    );
    device.submit(queue, &[one; 2]).unwrap();
    assert_eq!(
        device.submit(queue, &[one]),
        Err(SubmitError::Full {
            queue,
            needed: 1,
            free: 0
        })
    );
    let event = device.record(queue).unwrap();
    assert_eq!(
        device.record(Queue::CopyOut),
        Err(RecordError::Exhausted { events_max: 1 })
    );
    assert_eq!(device.wait(queue, event), Err(WaitError::Full { queue }));
    device.wait(Queue::Compute, event).unwrap();
    device.release(event);
    assert_eq!(device.wait(Queue::Compute, event), Err(WaitError::Unknown { event }));
    assert_eq!(
        device.record(Queue::CopyOut),
        Err(RecordError::Exhausted { events_max: 1 }),
        "a queue waits on it"
    );
    assert_eq!(device.stepper().run(), Step::Idle);
    let next = device.record(Queue::CopyOut).unwrap();
    assert_ne!(next, event);
    assert_eq!(device.poll(event), EventState::Failed);
}
