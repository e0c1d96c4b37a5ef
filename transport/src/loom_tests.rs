//! The ring, the terminal slots and the wake-up under every interleaving that loom finds (X34).
//!
//! The production code runs on loom's atomics, on a ring of eight lines. A reader polls a few times while the other side
//! works and looks again once it has ended, so that no model spins. Run by `tests/scripts/loom.sh`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use kvsluice_layout::ids::{OperationId, Position, ProcessEpoch, RequestEpoch};
use kvsluice_layout::plan::{Operation, Plan, PlanDraft};
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::{Terminal, TerminalSlot};
use kvsluice_layout::region::SLOTS_AT;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::clock::Simulated;
use crate::ring::{PlanReader, PlanWriter, RingShape};
use crate::shared::{Heap, Ordering, Shared, SharedMut};
use crate::slots::{SlotState, read_slot, write_slot};
use crate::wait::{Bell, Idle, Waiter, Wake, wake_sleepers};

const EPOCH: ProcessEpoch = ProcessEpoch(7);
const SHAPE: RingShape = RingShape { at: 0, bytes: 512 };
const RECLAIM: usize = 512;
/// Bytes of a record without rows and without a name: two lines.
const RECORD: u64 = 128;
/// Older than every record that a reader has not answered.
const ALL_ANSWERED: Position = Position(u64::MAX / 2);

/// Runs `model` in every interleaving, of at most so many preemptions, and with every value that a load may see. Returns
/// how many runs that took.
fn explore(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) -> usize {
    let executions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executions);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    executions.load(Ordering::Relaxed)
}

/// True where some interleaving makes `model` fail once `fault` is planted.
fn finds(fault: &'static str, model: impl FnOnce() -> usize) -> bool {
    catch_unwind(AssertUnwindSafe(|| with_planted(fault, model))).is_err()
}

fn keep(id: u64) -> PlanDraft {
    let mut draft = PlanDraft::new();
    let operation = Operation {
        request_epoch: RequestEpoch(1),
        operation_id: OperationId(id),
        ..Operation::default()
    };
    draft.keep(b"", operation);
    draft
}

fn write(writer: &mut PlanWriter<Heap>, id: u64) {
    writer.claim(RECORD, false).expect("room");
    writer.write(&keep(id), EPOCH, RECORD).expect("encodes");
}

/// The operation that the reader finds next, whole or not at all.
fn read(reader: &mut PlanReader<Heap>, unanswered: Position) -> Option<u64> {
    let at = reader.receive(unanswered).expect("framing holds")?;
    let plan = Plan::parse(reader.record(at)).expect("a record is visible only as a whole (X10)");
    Some(plan.operation().operation_id.0)
}

/// A ring whose first `laps` records were published, read and freed.
fn ring(laps: u64) -> (PlanWriter<Heap>, PlanReader<Heap>) {
    let memory = Heap::new(RECLAIM + 8);
    let mut writer = PlanWriter::new(memory.clone(), SHAPE, RECLAIM, 0, 0);
    let mut reader = PlanReader::new(memory, SHAPE, Position(0));
    for id in 0..laps {
        write(&mut writer, id);
        writer.commit();
        assert_eq!(read(&mut reader, ALL_ANSWERED), Some(id));
        let tail = writer.tail();
        writer.set_reclaim(tail);
    }
    (writer, reader)
}

/// A batch of two records over the wrap, and one more, while the reader polls.
fn batch() -> usize {
    explore(None, || {
        let (mut writer, mut reader) = ring(3);
        let writing = thread::spawn(move || {
            write(&mut writer, 10);
            write(&mut writer, 11);
            writer.commit();
            write(&mut writer, 12);
            writer.commit();
        });
        let mut found = Vec::new();
        for _ in 0..4 {
            found.extend(read(&mut reader, ALL_ANSWERED));
        }
        writing.join().expect("writer");
        while let Some(id) = read(&mut reader, ALL_ANSWERED) {
            found.push(id);
        }
        assert_eq!(found, [10, 11, 12], "each record once, in order");
    })
}

#[test]
fn loom_x10_a_batch_becomes_visible_whole_and_in_order() {
    println!("{} executions", batch());
    assert!(finds("x10_relaxed_commit", batch));
    assert!(finds("x10_stale_tail", batch));
    assert!(finds("x10_commit_early", batch));
}

/// A rank's segment, whose slots lie behind two pages: loom needs no atomics for what no model touches.
#[derive(Clone)]
struct Slots(Heap);

impl Slots {
    fn new() -> Self {
        Self(Heap::new(SHAPE.bytes))
    }
}

impl Shared for Slots {
    fn size(&self) -> usize {
        SLOTS_AT + self.0.size()
    }

    fn load(&self, at: usize) -> u64 {
        self.0.load(at - SLOTS_AT)
    }

    fn load_u32(&self, at: usize) -> u32 {
        self.0.load_u32(at - SLOTS_AT)
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.0.bytes_out(at - SLOTS_AT, into);
    }
}

impl SharedMut for Slots {
    fn store(&self, at: usize, word: u64) {
        self.0.store(at - SLOTS_AT, word);
    }

    fn store_release(&self, at: usize, word: u64) {
        self.0.store_release(at - SLOTS_AT, word);
    }

    fn store_u32(&self, at: usize, word: u32) {
        self.0.store_u32(at - SLOTS_AT, word);
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        self.0.bytes_in(at - SLOTS_AT, bytes);
    }
}

fn answer(position: Position, mark: u64) -> TerminalSlot {
    TerminalSlot {
        commit: position.0 + 1,
        identity: mark,
        producer_epoch: mark,
        worker_epoch: mark,
        status: Terminal::Done as u8,
        bytes_moved: mark,
        device_ns: mark,
        digest: mark,
        ..TerminalSlot::default()
    }
}

/// Two answers into one slot, a lap apart; whoever sees the second commit sees all of the second.
fn terminal() -> usize {
    explore(None, || {
        let slots = Slots::new();
        let (first, second) = (Position(128), Position(128 + SHAPE.bytes as u64));
        write_slot(&slots, SHAPE, first, &answer(first, 1));
        let segment = slots.clone();
        let worker = thread::spawn(move || write_slot(&segment, SHAPE, second, &answer(second, 2)));
        let whole = |state| match state {
            SlotState::Answered(found) => assert_eq!(found, answer(second, 2), "a terminal is visible whole (X12)"),
            SlotState::Open => {}
            SlotState::Stray(word) => panic!("{word} is no answer"),
        };
        for _ in 0..4 {
            whole(read_slot(&slots, SHAPE, second));
        }
        worker.join().expect("worker");
        assert_eq!(read_slot(&slots, SHAPE, second), SlotState::Answered(answer(second, 2)));
    })
}

#[test]
fn loom_x12_a_terminal_is_visible_whole_or_not_at_all() {
    println!("{} executions", terminal());
    assert!(finds("x12_commit_first", terminal));
}

/// The ring is full of records that the rank still reads. One answer frees one record's bytes, and no earlier look does.
fn reuse(waits_for_the_answer: bool) -> usize {
    explore(None, move || {
        let (mut writer, mut reader) = ring(0);
        for id in 0..3 {
            write(&mut writer, id);
        }
        writer.commit();
        let slots = Slots::new();
        let segment = slots.clone();
        let worker = thread::spawn(move || {
            assert_eq!(read(&mut reader, Position(0)), Some(0));
            write_slot(&segment, SHAPE, Position(0), &answer(Position(0), 1));
            let second = read(&mut reader, Position(RECORD));
            assert_eq!(second, Some(1));
        });
        for _ in 0..4 {
            let answered = matches!(read_slot(&slots, SHAPE, Position(0)), SlotState::Answered(_));
            if answered || !waits_for_the_answer {
                writer.set_reclaim(Position(RECORD));
                write(&mut writer, 3);
                writer.commit();
                break;
            }
        }
        worker.join().expect("worker");
    })
}

#[test]
fn loom_x11_bytes_are_reused_only_behind_the_answer() {
    println!("{} executions", reuse(true));
    let early = catch_unwind(|| reuse(false));
    assert!(early.is_err(), "a record that is overwritten while it is read is found");
}

/// The kernel's futex: the value is compared, and wakes are delivered, under one lock. There is no timeout, so that a
/// wake that gets lost is a deadlock, which loom reports.
#[derive(Clone)]
struct Futex(Arc<(Mutex<()>, Condvar)>);

impl Wake<Heap, Heap> for Futex {
    fn sleep(&self, on: &[(Heap, usize)], seen: &[u32], _bell: (&Bell, u32), _at_most: Duration) {
        let (lock, woken) = &*self.0;
        let guard = lock.lock().expect("lock");
        let mut on = on.iter().zip(seen);
        if on.all(|((segment, at), seen)| segment.load_u32(*at) == *seen) {
            drop(woken.wait(guard).expect("lock"));
        }
    }

    fn wake(&self, _own: &Heap, _at: usize) {
        let (lock, woken) = &*self.0;
        let _guard = lock.lock().expect("lock");
        woken.notify_all();
    }
}

/// A worker sleeps until there is a word, `rounds` times; its producer commits each and wakes whoever sleeps.
fn wake(rounds: u64, preemptions: Option<usize>) -> usize {
    const SLEEPING: usize = 0;
    const COUNTER: usize = 8;
    const WORK: usize = 16;
    explore(preemptions, move || {
        let futex = Futex(Arc::new((Mutex::new(()), Condvar::new())));
        let (own, peer) = (Heap::new(8), Heap::new(24));
        let (waker, asleep, producer) = (futex.clone(), own.clone(), peer.clone());
        let waking = thread::spawn(move || {
            for work in 1..=rounds {
                producer.store_release(WORK, work);
                wake_sleepers(&waker, &producer, COUNTER, [(&asleep, SLEEPING)]);
            }
        });
        let impatient = Idle {
            spins: 0,
            yields: 0,
            ..Idle::default()
        };
        let mut waiter = Waiter::new(futex, impatient);
        let peers = [(peer.clone(), COUNTER)];
        for due in 1..=rounds {
            let found = waiter.wait(&own, SLEEPING, &peers, &Simulated::default(), u64::MAX, || {
                Some(peer.load_acquire(WORK)).filter(|work| *work >= due)
            });
            assert!(found.is_some());
        }
        waking.join().expect("waker");
    })
}

#[test]
fn loom_x29_no_wake_is_lost() {
    println!("{} executions", wake(1, None) + wake(2, Some(4)));
    assert!(finds("x29_no_fence", || wake(1, None)));
    assert!(finds("x29_no_second_look", || wake(1, None)));
}
