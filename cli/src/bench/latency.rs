//! P1: one-way latency of a plan of one row and one id, both processes spinning.
//!
//! One way is half a round trip: publish → copied, validated, leased → answered → answer taken, leases returned. The
//! clock is read before the publish and after the completion; what one reading costs is measured in the same run and
//! taken off, for the baseline too.

use std::time::Instant;

use anyhow::Result;

use super::link::{Order, Pair, done};
use super::plans::Plans;
use super::report::Figure;
use super::rounds::{Round, Rounds, quantile};
use super::{Setup, bare};

const TRIPS: u64 = 1000;
/// P1: p50 at most this many times that of the bare ping-pong.
const TARGET: f64 = 1.5;

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let mut pair = Pair::start(setup)?;
    let mut plans = Plans::new(b"request0", 1, 1);
    let record_bytes = plans.record_bytes();
    let clock_ns = clock_cost_ns();
    let mut rounds = Vec::with_capacity(setup.rounds);
    let (mut bare_all, mut product_all) = (Vec::new(), Vec::new());
    let mut pings = 0;
    let one_way = |round_trip_ns: u64| (round_trip_ns as f64 - clock_ns).max(0.0) / 2.0;
    for _ in 0..setup.rounds {
        let mut bare = Vec::with_capacity(TRIPS as usize);
        pair.link.order(Order::Pong, TRIPS, 0);
        for _ in 0..TRIPS {
            pings += 1;
            let start = Instant::now();
            bare::ping(&mut pair.link, pings)?;
            bare.push(one_way(start.elapsed().as_nanos() as u64));
        }
        let quiet = pair.link.settle()?;

        let mut product = Vec::with_capacity(TRIPS as usize);
        pair.link.order(Order::Answer, TRIPS, 0);
        for _ in 0..TRIPS {
            let draft = plans.next();
            let start = Instant::now();
            pair.producer.publish(draft)?;
            let Pair { link, producer } = &mut pair;
            link.peer.wait(|| producer.poll() != 0)?;
            let ended = producer.next_completion();
            product.push(one_way(start.elapsed().as_nanos() as u64));
            done(ended)?;
        }
        let undisturbed = pair.link.settle()? && quiet;
        rounds.push(Round {
            bare_ns: quantile(bare.iter().copied(), 0.5),
            product_ns: quantile(product.iter().copied(), 0.5),
            undisturbed,
        });
        if undisturbed {
            bare_all.extend(bare);
            product_all.extend(product);
        }
    }
    let rounds = Rounds::new(&rounds);
    let mut figure = Figure::new(
        "P1",
        "one-way latency over a bare ping-pong, p50",
        rounds.slowdown(0.5),
        "ratio",
    )
    .at_most(TARGET)
    .with("ratio p10 of rounds", rounds.slowdown(0.1))
    .with("ratio p90 of rounds", rounds.slowdown(0.9))
    .with("record bytes", record_bytes)
    .with("clock reading taken off, ns", clock_ns);
    for (name, q) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
        figure = figure
            .with(&format!("plan {name}, ns"), quantile(product_all.iter().copied(), q))
            .with(&format!("ping-pong {name}, ns"), quantile(bare_all.iter().copied(), q));
    }
    Ok(vec![rounds.describe(figure)])
}

/// What reading the clock twice in a row shows: the part of every sample that is the clock's own.
fn clock_cost_ns() -> f64 {
    let samples = (0..100).map(|_| {
        let start = Instant::now();
        let mut last = start;
        for _ in 0..1000 {
            last = Instant::now();
        }
        (last - start).as_nanos() as f64 / 1000.0
    });
    quantile(samples, 0.5)
}
