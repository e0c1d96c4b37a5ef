//! P6: how long it takes to wake a worker that sleeps, and what an idle one costs.
//!
//! The peer sleeps; this process sees that it does, gives it time to be in the kernel, notes the time, commits and
//! wakes. The peer notes the time when it sees the commit. The baseline is one futex and nothing else: store, wake. Idle
//! cost is the processor time of a worker that waits in vain, over the time it waited.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvsluice_layout::region::{PRODUCER_WAKE_AT, WORKER_SLEEPING_AT};
use kvsluice_transport::segment::{Mapping, MappingMut};
use kvsluice_transport::shared::{Shared, SharedMut};
use kvsluice_transport::wait::{Futexes, Waitable, wake_sleepers};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use rustix::thread::futex;

use super::Setup;
use super::link::{ASLEEP_AT, COUNTER_AT, Link, Order, Pair, STAMP_AT, WOKEN_AT};
use super::plans::Plans;
use super::report::Figure;
use super::rounds::{Round, Rounds, quantile};

const WAKES: u64 = 20;
const IDLE_MS: u64 = 1000;
/// P6: at most this many times a bare futex wake.
const TARGET: f64 = 2.0;
/// P6: at most this share of a core, in percent.
const IDLE_TARGET: f64 = 1.0;
/// From the announcement of a sleep to the sleep itself.
const FALLING_ASLEEP: Duration = Duration::from_micros(100);

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let mut pair = Pair::start(setup)?;
    let mut plans = Plans::new(b"request0", 1, 1);
    let (mut rounds, mut woken) = (Vec::with_capacity(setup.rounds), 0);
    for _ in 0..setup.rounds {
        let mut bare = Vec::with_capacity(WAKES as usize);
        pair.link.order(Order::DozeBare, WAKES, 0);
        for _ in 0..WAKES {
            let asleep_at = pair.link.up_at + ASLEEP_AT;
            await_sleep(&mut pair.link, asleep_at)?;
            let down = &pair.link.down;
            down.store(STAMP_AT, now_ns());
            let counter = down.counter(COUNTER_AT);
            down.store_u32(COUNTER_AT, down.load_u32(COUNTER_AT).wrapping_add(1));
            futex::wake(counter, futex::Flags::empty(), 1)?;
            woken += 1;
            bare.push(wake_ns(&mut pair.link, woken)?);
        }
        let quiet = pair.link.settle()?;

        let mut product = Vec::with_capacity(WAKES as usize);
        pair.link.order(Order::Doze, WAKES, 0);
        for _ in 0..WAKES {
            await_sleep(&mut pair.link, WORKER_SLEEPING_AT)?;
            let draft = plans.next();
            pair.link.down.store(STAMP_AT, now_ns());
            pair.producer.publish(draft)?;
            let worker = [(&pair.link.up, WORKER_SLEEPING_AT)];
            wake_sleepers(&Futexes, pair.producer.control(), PRODUCER_WAKE_AT, worker);
            woken += 1;
            product.push(wake_ns(&mut pair.link, woken)?);
            pair.completions(1)?;
        }
        rounds.push(Round {
            bare_ns: quantile(bare.into_iter(), 0.5),
            product_ns: quantile(product.into_iter(), 0.5),
            undisturbed: pair.link.settle()? && quiet,
        });
    }
    let rounds = Rounds::new(&rounds);
    let wake = Figure::new(
        "P6",
        "idle wake latency over a bare futex wake",
        rounds.slowdown(0.5),
        "ratio",
    )
    .at_most(TARGET)
    .with("ratio p10 of rounds", rounds.slowdown(0.1))
    .with("ratio p90 of rounds", rounds.slowdown(0.9))
    .with("plan, us", rounds.product_ns() / 1e3)
    .with("bare futex, us", rounds.bare_ns() / 1e3);

    pair.link.order(Order::Idle, IDLE_MS, 0);
    pair.link.settle()?;
    let used_us = pair.link.up.load(pair.link.up_at + WOKEN_AT + 8);
    let share = used_us as f64 / (IDLE_MS as f64 * 10.0);
    let idle = Figure::new("P6", "processor time of an idle worker", share, "percent of a core")
        .at_most(IDLE_TARGET)
        .with("waited, ms", IDLE_MS)
        .with("processor time, us", used_us);
    Ok(vec![rounds.describe(wake), idle])
}

/// Waits until the peer has announced its sleep, and then until it sleeps.
fn await_sleep(link: &mut Link, announced_at: usize) -> Result<()> {
    let Link { up, peer, .. } = link;
    peer.wait(|| up.load_acquire(announced_at) == 1)?; // pairs with: doze_bare, wait::Waiter::wait
    let asleep = Instant::now() + FALLING_ASLEEP;
    while Instant::now() < asleep {}
    Ok(())
}

/// Waits for the peer's account of wake number `woken`, in nanoseconds.
fn wake_ns(link: &mut Link, woken: u64) -> Result<f64> {
    let Link { up, up_at, peer, .. } = link;
    peer.wait(|| up.load_acquire(*up_at + WOKEN_AT) == woken)?; // pairs with: say
    Ok(up.load(*up_at + WOKEN_AT + 8) as f64)
}

/// The peer's account of a wake: it sees the commit now.
pub(super) fn say(down: &Mapping, up: &MappingMut, up_at: usize) {
    let took_ns = now_ns().saturating_sub(down.load(STAMP_AT));
    let at = up_at + WOKEN_AT;
    up.store(at + 8, took_ns);
    up.store_release(at, up.load(at) + 1); // pairs with: wake_ns
}

/// The peer's side of the baseline, `count` times.
pub(super) fn doze_bare(down: &Mapping, up: &MappingMut, up_at: usize, count: u64) {
    for _ in 0..count {
        let seen = down.load_u32(COUNTER_AT);
        up.store_release(up_at + ASLEEP_AT, 1); // pairs with: await_sleep
        while down.load_u32(COUNTER_AT) == seen {
            // Woken, a counter that has moved, a signal: the loop looks itself.
            let _ = futex::wait(down.counter(COUNTER_AT), futex::Flags::empty(), seen, None);
        }
        up.store(up_at + ASLEEP_AT, 0);
        say(down, up, up_at);
    }
}

/// Processor time of this process so far, in microseconds.
pub(super) fn processor_us() -> u64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |used| {
        (used.user_time().num_microseconds() + used.system_time().num_microseconds()) as u64
    })
}

/// Nanoseconds of the monotonic clock, the same in every process.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
