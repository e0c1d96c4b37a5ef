//! P2: small plans, sustained and batched, publish → validated → terminal.
//!
//! The producer builds each plan, enqueues and flushes them in batches and takes the completions; the worker copies
//! each out, validates, leases and answers it. The baseline is the same number of records of the same size through the
//! same memory: no validation, no completions, one position back per batch.

use std::time::Instant;

use anyhow::Result;
use kvsluice_transport::producer::PublishError;

use super::Setup;
use super::bare::{BATCH, Sender};
use super::link::{Order, Pair, done};
use super::plans::Plans;
use super::report::Figure;
use super::rounds::{Round, Rounds};

const PLANS: u64 = 20_000;
/// Plans that may be in flight: their destinations must not come around.
const IN_FLIGHT: u64 = 256;
/// P2: at least this share of the bare stream's rate.
const TARGET: f64 = 0.35;

/// A request id of 8 bytes with one id, and one of the length of a UUID with four: 192 and 256 bytes.
const SHAPES: [(&[u8], u32); 2] = [(b"request0", 1), (b"1b4e28ba-2fa1-11d2-883f-0016d3cca427", 4)];

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    let mut pair = Pair::start(setup)?;
    let mut sender = Sender::new(setup.ring_bytes);
    let mut figures = Vec::new();
    for (request, pairs) in SHAPES {
        let mut plans = Plans::new(request, 1, pairs);
        let bytes = plans.record_bytes();
        let mut rounds = Vec::with_capacity(setup.rounds);
        for _ in 0..setup.rounds {
            pair.link.order(Order::Take, PLANS, bytes as u64);
            let start = Instant::now();
            sender.send(&mut pair.link, PLANS, bytes)?;
            let bare_ns = start.elapsed().as_nanos() as f64 / PLANS as f64;
            let quiet = pair.link.settle()?;

            pair.link.order(Order::Answer, PLANS, 0);
            let start = Instant::now();
            stream(&mut pair, &mut plans, PLANS)?;
            let product_ns = start.elapsed().as_nanos() as f64 / PLANS as f64;
            rounds.push(Round {
                bare_ns,
                product_ns,
                undisturbed: pair.link.settle()? && quiet,
            });
        }
        let rounds = Rounds::new(&rounds);
        let share = 1.0 / rounds.slowdown(0.5);
        let what = format!("plans of {bytes} B with {pairs} ids, share of a bare stream's rate");
        let figure = Figure::new("P2", what, share, "ratio")
            .at_least(TARGET)
            .with("ratio p10 of rounds", 1.0 / rounds.slowdown(0.9))
            .with("ratio p90 of rounds", 1.0 / rounds.slowdown(0.1))
            .with("plans, M/s", 1e3 / rounds.product_ns())
            .with("bare records, M/s", 1e3 / rounds.bare_ns())
            .with("ns per plan", rounds.product_ns())
            .with("batch", BATCH);
        figures.push(rounds.describe(figure));
    }
    Ok(figures)
}

/// Publishes `count` plans in batches and takes their completions.
pub(super) fn stream(pair: &mut Pair, plans: &mut Plans, count: u64) -> Result<()> {
    let Pair { link, producer } = pair;
    let (mut published, mut ended) = (0, 0);
    let mut held = false;
    while ended != count {
        let mut batch = 0;
        while batch != BATCH && published != count && published - ended < IN_FLIGHT {
            let draft = if held { plans.last() } else { plans.next() };
            match producer.enqueue(draft) {
                Ok(_) => (held, published, batch) = (false, published + 1, batch + 1),
                Err(PublishError::Full { .. }) => {
                    held = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        producer.flush();
        link.peer.wait(|| producer.poll() != 0)?;
        while let Some(completion) = producer.next_completion() {
            done(Some(completion))?;
            ended += 1;
        }
    }
    Ok(())
}
