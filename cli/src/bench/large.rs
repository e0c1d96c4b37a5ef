//! P3: a plan of 64 rows with 64 ids each: encode + publish + validate, with its checks (X9) and leases on both sides.
//!
//! From the call of publish until the worker says, with one word, that the plan is copied, validated and leased. The
//! baseline copies the same number of bytes in, and the peer copies them out and says so with one word.

use std::time::Instant;

use anyhow::Result;
use kvsluice_transport::shared::Shared;

use super::Setup;
use super::bare::Sender;
use super::link::{Order, Pair, VALIDATED_AT};
use super::plans::Plans;
use super::report::Figure;
use super::rounds::{Round, Rounds, quantile};

const ROWS: u32 = 64;
const IDS: u32 = 64;
const TRIPS: u64 = 50;
/// P3: at most this many times the bare copies.
const TARGET: f64 = 3.0;

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let mut pair = Pair::start(setup)?;
    let mut sender = Sender::new(setup.ring_bytes);
    let mut plans = Plans::new(b"request0", ROWS, IDS);
    let bytes = plans.record_bytes();
    let mut validated = 0;
    let mut rounds = Vec::with_capacity(setup.rounds);
    for _ in 0..setup.rounds {
        pair.link.order(Order::TakeEach, TRIPS, bytes as u64);
        let mut bare = Vec::with_capacity(TRIPS as usize);
        for _ in 0..TRIPS {
            let start = Instant::now();
            sender.send(&mut pair.link, 1, bytes)?;
            bare.push(start.elapsed().as_nanos() as f64);
        }
        let quiet = pair.link.settle()?;

        pair.link.order(Order::Validate, TRIPS, 0);
        let mut product = Vec::with_capacity(TRIPS as usize);
        for _ in 0..TRIPS {
            let draft = plans.next();
            validated += 1;
            let start = Instant::now();
            pair.producer.publish(draft)?;
            let at = pair.link.up_at + VALIDATED_AT;
            let up = &pair.link.up;
            pair.link.peer.wait(|| up.load_acquire(at) == validated)?; // pairs with: peer::Worker::obey
            product.push(start.elapsed().as_nanos() as f64);
            pair.completions(1)?;
        }
        rounds.push(Round {
            bare_ns: quantile(bare.into_iter(), 0.5),
            product_ns: quantile(product.into_iter(), 0.5),
            undisturbed: pair.link.settle()? && quiet,
        });
    }
    let rounds = Rounds::new(&rounds);
    let what = format!("a plan of {ROWS} rows x {IDS} ids over bare copies of its {bytes} bytes");
    let figure = Figure::new("P3", what, rounds.slowdown(0.5), "ratio")
        .at_most(TARGET)
        .with("ratio p10 of rounds", rounds.slowdown(0.1))
        .with("ratio p90 of rounds", rounds.slowdown(0.9))
        .with("plan, us", rounds.product_ns() / 1e3)
        .with("bare copies, us", rounds.bare_ns() / 1e3)
        .with("ids", ROWS * IDS);
    Ok(vec![rounds.describe(figure)])
}
