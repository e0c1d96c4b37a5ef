//! Waiting for the other side: spin, then yield, then sleep on a counter (X29).
//!
//! Each process has two words in its own segment: `sleeping`, which says that somebody should wake it, and a 32-bit
//! counter, which it bumps to wake others. Who sleeps stores 1 into `sleeping`, fences, looks again, and then sleeps on
//! the *others'* counters, through mappings that it cannot write. Who has committed something fences, looks at the others'
//! `sleeping` words, and only if one is set bumps its own counter and wakes its sleepers. So a busy pair makes no system
//! call, and either the sleeper sees the commit or the waker sees the sleeper.
//!
//! No sleep is longer than [`SLEEP_MAX`]: a wake that gets lost costs that much and no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvsluice_layout::ids::MAX_RANKS;
use kvsluice_layout::planted::planted;
#[cfg(not(loom))]
use rustix::io::Errno;
use rustix::thread::futex;

use crate::clock::Clock;
use crate::shared::{Shared, SharedMut, full_fence};

/// The longest sleep without a look around.
pub const SLEEP_MAX: Duration = Duration::from_millis(50);

/// How a process sleeps on the counters of others and wakes those that sleep on its own: the kernel's futexes in
/// production, something that counts or loses wakes in tests (X35).
pub trait Wake<P, O> {
    /// Sleeps until one of the counters `on` (segment, offset) is not what was `seen`, or the bell is not what it was,
    /// or somebody wakes a sleeper on one of them, or `at_most` has passed. Waking early is always allowed.
    fn sleep(&self, on: &[(P, usize)], seen: &[u32], bell: (&Bell, u32), at_most: Duration);

    /// Wakes all who sleep on the counter at `at` of this process's own segment.
    fn wake(&self, own: &O, at: usize);
}

/// As many sleepers as the kernel can count: it takes the number for a signed one, and any negative one for 1.
const EVERYBODY: u32 = i32::MAX as u32;

/// Wakes a sleeper of this very process: for the watcher, which has seen a death (X23). Clones are one bell.
#[derive(Clone, Debug, Default)]
pub struct Bell {
    rung: Arc<AtomicU32>,
}

impl Bell {
    /// Makes the sleeper look around, now or before its next sleep.
    pub fn ring(&self) {
        // pairs with: Bell::rung. What was noted before the ring is seen by the sleeper's next look.
        self.rung.fetch_add(1, Ordering::Release);
        // Nobody to wake is no error.
        let _ = futex::wake(&self.rung, futex::Flags::PRIVATE, EVERYBODY);
    }

    fn rung(&self) -> u32 {
        // pairs with: Bell::ring.
        self.rung.load(Ordering::Acquire)
    }
}

/// How patiently a process waits before it sleeps. Counted in looks, not in time, so that a simulation is exact.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// Looks with nothing but a pause between them.
    pub spins: u32,
    /// Looks that let others run in between.
    pub yields: u32,
    /// Longest sleep; more than [`SLEEP_MAX`] is not taken.
    pub sleep_max: Duration,
}

impl Default for Idle {
    /// Some tens of microseconds awake, then asleep.
    fn default() -> Self {
        Self {
            spins: 1_000,
            yields: 32,
            sleep_max: SLEEP_MAX,
        }
    }
}

/// A process that waits. Its own segment has the sleeping word at `sleeping_at`.
pub struct Waiter<W> {
    wake: W,
    idle: Idle,
    bell: Bell,
    sleeps: u64,
}

impl<W> Waiter<W> {
    /// A waiter that sleeps by `wake` once it has been patient as `idle` says.
    pub fn new(wake: W, idle: Idle) -> Self {
        Self {
            wake,
            idle,
            bell: Bell::default(),
            sleeps: 0,
        }
    }

    /// What wakes this waiter from inside the process.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// How often it has slept.
    pub fn sleeps(&self) -> u64 {
        self.sleeps
    }

    /// The way to wake others.
    pub fn wake(&self) -> &W {
        &self.wake
    }

    /// Looks until `ready` has something to give, or the clock has reached `until_ns`.
    ///
    /// `ready` reads the words that the peers commit with acquire loads; it is also where the caller looks for deaths.
    /// `peers` are (segment, offset of its counter), at most one per rank; more are looked at but not slept on.
    pub fn wait<P: Shared, O: SharedMut, T>(
        &mut self,
        own: &O,
        sleeping_at: usize,
        peers: &[(P, usize)],
        clock: &dyn Clock,
        until_ns: u64,
        mut ready: impl FnMut() -> Option<T>,
    ) -> Option<T>
    where
        W: Wake<P, O>,
    {
        for _ in 0..self.idle.spins {
            if let Some(found) = ready() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        for _ in 0..self.idle.yields {
            if let Some(found) = ready() {
                return Some(found);
            }
            std::thread::yield_now();
        }
        loop {
            // Before the last look: a counter that moves after it was read here ends the sleep at once.
            let bell = self.bell.rung();
            let mut seen = [0; MAX_RANKS as usize];
            for (seen, (segment, at)) in seen.iter_mut().zip(peers) {
                *seen = segment.load_u32(*at);
            }
            // X29
            own.store(sleeping_at, 1);
            full_fence();
            if !planted("x29_no_second_look")
                && let Some(found) = ready()
            {
                own.store(sleeping_at, 0);
                return Some(found);
            }
            let now_ns = clock.now_ns();
            let left = Duration::from_nanos(until_ns.saturating_sub(now_ns));
            let bound = if planted("x29_unbounded_sleep") {
                Duration::MAX
            } else {
                SLEEP_MAX
            };
            if !left.is_zero() {
                self.sleeps += 1;
                let at_most = left.min(self.idle.sleep_max).min(bound);
                self.wake.sleep(peers, &seen, (&self.bell, bell), at_most);
            }
            own.store(sleeping_at, 0);
            if let Some(found) = ready() {
                return Some(found);
            }
            if left.is_zero() {
                return None;
            }
        }
    }
}

/// Wakes the peers that sleep, if any: once per batch, after the batch's commit. `peers` are (segment, offset of its
/// sleeping word). True where somebody was woken.
pub fn wake_sleepers<'a, P: Shared + 'a, O: SharedMut>(
    wake: &impl Wake<P, O>,
    own: &O,
    counter_at: usize,
    peers: impl IntoIterator<Item = (&'a P, usize)>,
) -> bool {
    // X29: between the commit and the look at who sleeps.
    full_fence();
    if !peers.into_iter().any(|(peer, sleeping_at)| peer.load(sleeping_at) != 0) {
        return false;
    }
    own.store_u32(counter_at, own.load_u32(counter_at).wrapping_add(1));
    wake.wake(own, counter_at);
    true
}

/// A mapped segment whose counters the kernel can wait on.
#[cfg(not(loom))]
pub trait Waitable: Shared {
    /// The counter at `at`. Through a mapping for reading, only loads and futex calls may be made on it.
    fn counter(&self, at: usize) -> &AtomicU32;
}

#[cfg(not(loom))]
impl Waitable for crate::segment::Mapping {
    fn counter(&self, at: usize) -> &AtomicU32 {
        self.atomic_u32(at)
    }
}

#[cfg(not(loom))]
impl Waitable for crate::segment::MappingMut {
    fn counter(&self, at: usize) -> &AtomicU32 {
        self.reader().atomic_u32(at)
    }
}

/// The kernel's futexes, shared between processes.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Futexes;

#[cfg(not(loom))]
impl<P: Waitable, O: Waitable> Wake<P, O> for Futexes {
    fn sleep(&self, on: &[(P, usize)], seen: &[u32], (bell, rung): (&Bell, u32), at_most: Duration) {
        let mut waits = [futex::Wait::new(); MAX_RANKS as usize + 1];
        let counters = on
            .iter()
            .zip(seen)
            .map(|((segment, at), seen)| (segment.counter(*at), *seen));
        let mut count = 0;
        let all = counters.map(|counter| (counter, futex::WaitFlags::empty()));
        let bell = ((&*bell.rung, rung), futex::WaitFlags::PRIVATE);
        for (wait, ((counter, value), scope)) in waits.iter_mut().zip(std::iter::once(bell).chain(all)) {
            wait.val = value.into();
            wait.uaddr = futex::WaitPtr::new(counter.as_ptr().cast());
            wait.flags = futex::WaitFlags::SIZE_U32 | scope;
            count += 1;
        }
        let Some(waits) = waits.get(..count) else { return };
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let until = rustix::time::Timespec::try_from(at_most)
            .ok()
            .and_then(|at_most| now.checked_add(at_most));
        let flags = futex::WaitvFlags::empty();
        match futex::waitv(waits, flags, until.as_ref(), rustix::thread::ClockId::Monotonic) {
            // Woken, out of time, a counter that has moved, a signal: all of them end the sleep.
            Ok(_) | Err(Errno::TIMEDOUT | Errno::AGAIN | Errno::INTR) => {}
            // Linux before 5.16, or a sandbox that does not let the call through: short naps on one counter.
            Err(_) => nap(
                on.iter()
                    .zip(seen)
                    .next()
                    .map(|((segment, at), seen)| (segment.counter(*at), *seen)),
                at_most,
            ),
        }
    }

    fn wake(&self, own: &O, at: usize) {
        // Nobody to wake is no error.
        let _ = futex::wake(own.counter(at), futex::Flags::empty(), EVERYBODY);
    }
}

/// Where a process cannot wait on many counters, it waits on one and looks at the others this often.
#[cfg(not(loom))]
const NAP: Duration = Duration::from_millis(1);

#[cfg(not(loom))]
fn nap(counter: Option<(&AtomicU32, u32)>, at_most: Duration) {
    let at_most = at_most.min(NAP);
    let timeout = rustix::time::Timespec::try_from(at_most).ok();
    let slept = counter.map(|(counter, seen)| futex::wait(counter, futex::Flags::empty(), seen, timeout.as_ref()));
    if !matches!(slept, Some(Ok(()) | Err(Errno::TIMEDOUT | Errno::AGAIN | Errno::INTR))) {
        std::thread::sleep(at_most);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::cell::{Cell, RefCell};

    use kvsluice_layout::planted::with_planted;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::clock::{Monotonic, Simulated};
    use crate::segment::{Mapping, MappingMut};
    use crate::shared::Heap;

    const SLEEPING: usize = 0;
    const COUNTER: usize = 64;
    const WORK: usize = 128;
    const FOR_EVER: u64 = u64::MAX;

    /// Loses every wake. A sleep lasts as long as it may, on a simulated clock; `during` happens meanwhile.
    struct Dropped<'a> {
        clock: Simulated,
        sleeps: RefCell<Vec<Duration>>,
        wakes: Cell<u32>,
        during: &'a dyn Fn(&Self),
    }

    impl<'a> Dropped<'a> {
        fn new(during: &'a dyn Fn(&Self)) -> Self {
            Self {
                clock: Simulated::default(),
                sleeps: RefCell::default(),
                wakes: Cell::default(),
                during,
            }
        }
    }

    impl Wake<Heap, Heap> for &Dropped<'_> {
        fn sleep(&self, on: &[(Heap, usize)], seen: &[u32], (bell, rung): (&Bell, u32), at_most: Duration) {
            let moved = on
                .iter()
                .zip(seen)
                .any(|((segment, at), seen)| segment.load_u32(*at) != *seen);
            if moved || bell.rung() != rung {
                return;
            }
            (self.during)(self);
            self.sleeps.borrow_mut().push(at_most);
            self.clock
                .advance_ns(u64::try_from(at_most.as_nanos()).unwrap_or(u64::MAX));
        }

        fn wake(&self, _own: &Heap, _at: usize) {
            self.wakes.set(self.wakes.get() + 1);
        }
    }

    fn idle() -> Idle {
        Idle {
            spins: 3,
            yields: 2,
            ..Idle::default()
        }
    }

    fn work(peer: &Heap) -> Option<u64> {
        Some(peer.load_acquire(WORK)).filter(|work| *work != 0)
    }

    /// The longest single sleep when the wake that announces a piece of work is lost.
    fn sleep_with_lost_wake() -> Duration {
        let (own, peer) = (Heap::new(256), Heap::new(256));
        let during = |wake: &Dropped<'_>| {
            peer.store_release(WORK, 9);
            assert!(
                wake_sleepers(&wake, &peer, COUNTER, [(&own, SLEEPING)]),
                "the sleeper is seen"
            );
        };
        let wake = Dropped::new(&during);
        let mut waiter = Waiter::new(&wake, idle());
        let peers = [(peer.clone(), COUNTER)];
        let found = waiter.wait(&own, SLEEPING, &peers, &wake.clock, FOR_EVER, || work(&peer));
        assert_eq!((found, waiter.sleeps(), wake.wakes.get()), (Some(9), 1, 1));
        assert_eq!(own.load(SLEEPING), 0);
        wake.sleeps.borrow()[0]
    }

    #[test]
    fn x29_field_2_a_lost_wake_costs_one_bounded_sleep() {
        assert_eq!(sleep_with_lost_wake(), SLEEP_MAX);
        // It goes red: without the bound the sleep would last for ever.
        assert!(with_planted("x29_unbounded_sleep", || {
            let long = Idle {
                sleep_max: Duration::MAX,
                ..idle()
            };
            let (own, peer) = (Heap::new(256), Heap::new(256));
            let during = |_: &Dropped<'_>| peer.store_release(WORK, 9);
            let wake = Dropped::new(&during);
            let peers = [(peer.clone(), COUNTER)];
            Waiter::new(&wake, long).wait(&own, SLEEPING, &peers, &wake.clock, FOR_EVER, || work(&peer));
            wake.sleeps.borrow()[0] > SLEEP_MAX
        }));
    }

    #[test]
    fn x29_work_that_comes_between_the_last_look_and_the_sleep_is_not_slept_on() {
        // The waker commits right after the sleeper's first look in vain, sees nobody asleep and wakes nobody.
        let looks_of = || {
            let (own, peer) = (Heap::new(256), Heap::new(256));
            let wake = Dropped::new(&|_| {});
            let impatient = Idle {
                spins: 1,
                yields: 0,
                ..Idle::default()
            };
            let looks = Cell::new(0);
            let peers = [(peer.clone(), COUNTER)];
            let mut waiter = Waiter::new(&wake, impatient);
            waiter.wait(&own, SLEEPING, &peers, &wake.clock, FOR_EVER, || {
                looks.set(looks.get() + 1);
                let found = work(&peer);
                if looks.get() == 1 {
                    peer.store_release(WORK, 9);
                    assert!(!wake_sleepers(&&wake, &peer, COUNTER, [(&own, SLEEPING)]));
                }
                found
            });
            waiter.sleeps()
        };
        assert_eq!(looks_of(), 0);
        assert_eq!(
            with_planted("x29_no_second_look", looks_of),
            1,
            "without the second look it sleeps on it"
        );
    }

    #[test]
    fn x29_a_waiter_looks_at_most_20_times_a_second_once_it_is_idle() {
        let (own, peer) = (Heap::new(256), Heap::new(256));
        let wake = Dropped::new(&|_| {});
        let mut waiter = Waiter::new(&wake, idle());
        let looks = Cell::new(0);
        let ten_seconds = 10_000_000_000;
        let peers = [(peer, COUNTER)];
        let found = waiter.wait(&own, SLEEPING, &peers, &wake.clock, ten_seconds, || {
            looks.set(looks.get() + 1);
            None::<()>
        });
        assert_eq!((found, waiter.sleeps()), (None, 200));
        // Awake: 5. Per sleep one before and one after it. At the deadline one more of each.
        assert_eq!(looks.get(), 5 + 2 * 200 + 2);
        assert_eq!(wake.clock.now_ns(), ten_seconds);
        assert_eq!(own.load(SLEEPING), 0);
    }

    #[test]
    fn x29_a_busy_pair_wakes_nobody_and_writes_no_counter() {
        let (own, peer) = (Heap::new(256), Heap::new(256));
        let wake = Dropped::new(&|_| {});
        assert!(!wake_sleepers(&&wake, &own, COUNTER, [(&peer, SLEEPING)]));
        assert_eq!((wake.wakes.get(), own.load_u32(COUNTER)), (0, 0));
        peer.store(SLEEPING, 1);
        own.store_u32(COUNTER, u32::MAX);
        assert!(wake_sleepers(&&wake, &own, COUNTER, [(&peer, SLEEPING)]));
        assert_eq!((wake.wakes.get(), own.load_u32(COUNTER)), (1, 0), "the counter wraps");
    }

    #[test]
    fn x23_the_bell_ends_a_sleep_and_is_not_missed_before_one() {
        let (own, peer) = (Heap::new(256), Heap::new(256));
        let wake = Dropped::new(&|_| {});
        let mut waiter = Waiter::new(
            &wake,
            Idle {
                spins: 0,
                yields: 0,
                ..Idle::default()
            },
        );
        let bell = waiter.bell().clone();
        let (dead, looks) = (Cell::new(false), Cell::new(0));
        let peers = [(peer, COUNTER)];
        waiter.wait(&own, SLEEPING, &peers, &wake.clock, FOR_EVER, || {
            looks.set(looks.get() + 1);
            let seen = dead.get();
            if looks.get() == 1 {
                // The watcher notes a death and rings just after the last look.
                dead.set(true);
                bell.ring();
            }
            seen.then_some(())
        });
        assert!(wake.sleeps.borrow().is_empty(), "it slept although the bell had rung");
    }

    /// The kernel's own, without the bound that would hide a lost wake: one that is lost is never made up for.
    struct Unbounded;

    impl Wake<Mapping, MappingMut> for Unbounded {
        fn sleep(&self, on: &[(Mapping, usize)], seen: &[u32], bell: (&Bell, u32), _at_most: Duration) {
            let hour = Duration::from_secs(3600);
            Wake::<Mapping, MappingMut>::sleep(&Futexes, on, seen, bell, hour);
        }

        fn wake(&self, own: &MappingMut, at: usize) {
            Wake::<Mapping, MappingMut>::wake(&Futexes, own, at);
        }
    }

    fn segment() -> (MappingMut, Mapping) {
        let memory = memfd_create("wait", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 4096).unwrap();
        (
            MappingMut::writable(&memory, 4096).unwrap(),
            Mapping::read_only(&memory, 4096).unwrap(),
        )
    }

    /// Starts a process's thread that waits for each of `peers` in turn and then for its bell, and tells when it has.
    fn sleeper(peers: Vec<Mapping>) -> (Mapping, Bell, std::sync::mpsc::Receiver<usize>) {
        let (own, own_reader) = segment();
        let (tell, told) = std::sync::mpsc::channel();
        let mut waiter = Waiter::new(
            Unbounded,
            Idle {
                spins: 0,
                yields: 0,
                ..Idle::default()
            },
        );
        let bell = waiter.bell().clone();
        std::thread::spawn(move || {
            let clock = Monotonic::default();
            let peers: Vec<_> = peers.into_iter().map(|peer| (peer, COUNTER)).collect();
            for (i, (peer, _)) in peers.iter().enumerate() {
                let ready = || Some(peer.load_acquire(WORK)).filter(|work| *work != 0);
                waiter.wait(&own, SLEEPING, &peers, &clock, FOR_EVER, ready);
                tell.send(i).unwrap();
            }
            let before = waiter.bell().rung();
            let rung = waiter.bell().clone();
            waiter.wait(&own, SLEEPING, &peers, &clock, FOR_EVER, || {
                (rung.rung() != before).then_some(())
            });
            tell.send(peers.len()).unwrap();
        });
        (own_reader, bell, told)
    }

    fn until_it_sleeps(sleeper: &Mapping) {
        while sleeper.load(SLEEPING) == 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn x29_a_sleeper_on_64_read_only_segments_is_woken_by_each_and_by_its_bell() {
        let (writers, readers): (Vec<_>, Vec<_>) = (0..64).map(|_| segment()).unzip();
        let (sleeping, bell, told) = sleeper(readers);
        let minute = Duration::from_secs(60);
        for (i, writer) in writers.iter().enumerate() {
            // Only once the other side sleeps, so that each commit needs its wake.
            until_it_sleeps(&sleeping);
            writer.store_release(WORK, 1);
            assert!(wake_sleepers(&Unbounded, writer, COUNTER, [(&sleeping, SLEEPING)]));
            assert_eq!(told.recv_timeout(minute), Ok(i));
        }
        until_it_sleeps(&sleeping);
        bell.ring();
        assert_eq!(told.recv_timeout(minute), Ok(64));
    }

    #[test]
    fn x29_one_commit_wakes_all_that_sleep_on_it() {
        let (writer, reader) = segment();
        let sleepers: Vec<_> = (0..4).map(|_| sleeper(vec![reader.clone()])).collect();
        for (sleeping, _, _) in &sleepers {
            until_it_sleeps(sleeping);
        }
        writer.store_release(WORK, 1);
        assert!(wake_sleepers(
            &Unbounded,
            &writer,
            COUNTER,
            sleepers.iter().map(|(sleeping, _, _)| (sleeping, SLEEPING))
        ));
        for (_, _, told) in &sleepers {
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(0));
        }
        sleepers.iter().for_each(|(_, bell, _)| bell.ring());
    }
}
