//! The worker's process of a measurement: a real port that answers plans, and the other end of each baseline.

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use kvsluice_layout::ids::{Position, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::record::Kind;
use kvsluice_layout::region::{PRODUCER_WAKE_AT, WORKER_SLEEPING_AT};
use kvsluice_layout::segment::SegmentKind;
use kvsluice_transport::clock::Monotonic;
use kvsluice_transport::peers::Peers;
use kvsluice_transport::port::{Incoming, Outcome, Port, Ticket};
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::segment::{Mapping, MappingMut, open_reader, open_writer};
use kvsluice_transport::shared::{Shared, SharedMut};
use kvsluice_transport::wait::{Futexes, Idle, Waiter};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::bare;
use super::link::wanted;
use super::link::{
    DONE_AT, ORDER_AT, Order, PRODUCER, VALIDATED_AT, WOKEN_AT, WORKER, core_losses, geometry, inherited, region, up_at,
};
use super::{allocations, hotpath, machine, wake};

/// What the peer process is started with.
#[derive(Args)]
pub(crate) struct PeerArgs {
    #[arg(long)]
    core: usize,
    #[arg(long)]
    ring_bytes: usize,
    /// Inherited descriptors
    #[arg(long)]
    control: i32,
    #[arg(long)]
    pool: i32,
    #[arg(long)]
    rank: i32,
}

struct Worker {
    port: Port<Mapping, MappingMut>,
    down: Mapping,
    up_at: usize,
    taker: bare::Taker,
    validated: u64,
}

/// Runs the peer until it is told to quit or its producer is gone.
pub(super) fn run(args: &PeerArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    machine::pin(&[args.core])?;
    let geometry = geometry()?;
    let map = region(&geometry, args.ring_bytes)?;
    let peers = Peers::default();
    let control = open_reader(&inherited(args.control, false)?, &wanted(SegmentKind::Control, &peers))?;
    let down = open_reader(&inherited(args.pool, false)?, &wanted(SegmentKind::Pool, &peers))?;
    let rank = open_writer(
        &inherited(args.rank, true)?,
        &wanted(SegmentKind::Rank(Rank(0)), &peers),
    )?;
    let shape = RingShape {
        at: map.ring_at(),
        bytes: map.ring_bytes(),
    };
    let leases = LeaseTable::new(&geometry);
    let port = Port::new(control, rank, shape, leases, WORKER, PRODUCER, Position(0));
    let mut worker = Worker {
        port,
        down,
        up_at: up_at(&map)?,
        taker: bare::Taker::new(args.ring_bytes),
        validated: 0,
    };
    for number in 1.. {
        let [order, count, bytes] = worker.next_order(number);
        let (losses, allocated) = (core_losses(), allocations::count());
        let order = Order::from_code(order).with_context(|| format!("unknown order {order}"))?;
        match order {
            Order::Quit => break,
            order => worker.obey(order, count, bytes as usize)?,
        }
        worker.done(number, core_losses() - losses, allocations::count() - allocated);
    }
    Ok(())
}

impl Worker {
    fn next_order(&self, number: u64) -> [u64; 3] {
        // pairs with: link::Link::order. The kernel ends this loop when the producer dies.
        while self.down.load_acquire(ORDER_AT) != number {}
        let mut words = [0; 3];
        self.down.copy_out(ORDER_AT + 8, &mut words);
        words
    }

    fn done(&self, number: u64, losses: u64, allocated: u64) {
        let (up, at) = (self.port.rank(), self.up_at + DONE_AT);
        up.copy_in(at + 8, &[losses, allocated]);
        up.store_release(at, number); // pairs with: link::Link::settle
    }

    fn obey(&mut self, order: Order, count: u64, bytes: usize) -> Result<()> {
        match order {
            Order::Answer => {
                for _ in 0..count {
                    let ticket = self.receive()?;
                    self.finish(ticket);
                }
            }
            Order::Validate => {
                for _ in 0..count {
                    let ticket = self.receive()?;
                    self.validated += 1;
                    // pairs with: large::product_round
                    self.port
                        .rank()
                        .store_release(self.up_at + VALIDATED_AT, self.validated);
                    self.finish(ticket);
                }
            }
            Order::Pong => bare::pong(&self.down, self.port.rank(), self.up_at, count),
            Order::Take | Order::TakeEach => {
                let batch = if order == Order::Take { bare::BATCH } else { 1 };
                self.taker
                    .take(&self.down, self.port.rank(), self.up_at, count, bytes, batch);
            }
            Order::Doze => self.doze(count)?,
            Order::DozeBare => wake::doze_bare(&self.down, self.port.rank(), self.up_at, count),
            Order::Idle => self.idle(count),
            Order::Mark => hotpath::mark(),
            Order::Quit => {}
        }
        Ok(())
    }

    /// Sleeps until each of `count` plans comes.
    fn doze(&mut self, count: u64) -> Result<()> {
        let mut waiter = Waiter::new(Futexes, Idle::default());
        let (rank, control) = (self.port.rank().clone(), self.port.control().clone());
        let on = [(control, PRODUCER_WAKE_AT)];
        for _ in 0..count {
            let port = &mut self.port;
            waiter.wait(&rank, WORKER_SLEEPING_AT, &on, &Monotonic::default(), u64::MAX, || {
                port.has_next().then_some(())
            });
            wake::say(&self.down, &rank, self.up_at);
            let ticket = self.receive()?;
            self.finish(ticket);
        }
        Ok(())
    }

    /// Waits in vain for `wait_ms`.
    fn idle(&mut self, wait_ms: u64) {
        let mut waiter = Waiter::new(Futexes, Idle::default());
        let (rank, on) = (
            self.port.rank().clone(),
            [(self.port.control().clone(), PRODUCER_WAKE_AT)],
        );
        let port = &mut self.port;
        let before_us = wake::processor_us();
        waiter.wait(
            &rank,
            WORKER_SLEEPING_AT,
            &on,
            &Monotonic::default(),
            wait_ms * 1_000_000,
            || port.has_next().then_some(()),
        );
        rank.store(self.up_at + WOKEN_AT + 8, wake::processor_us() - before_us);
    }

    fn receive(&mut self) -> Result<Ticket> {
        loop {
            match self.port.receive() {
                Ok(None) => {}
                Ok(Some(Incoming::Plan(ticket))) => return Ok(ticket),
                Ok(Some(Incoming::Rejected {
                    operation_id, refusal, ..
                })) => {
                    bail!("operation {operation_id} refused: {refusal}")
                }
                Ok(Some(Incoming::AwaitHandshake(epoch))) => bail!("record of an unknown producer {epoch}"),
                Err(broken) => return Err(anyhow!(broken)),
            }
        }
    }

    fn finish(&mut self, ticket: Ticket) {
        if ticket.kind() == Kind::Reset
            && let Some(generation) = self.port.plan(&ticket).map(|plan| plan.operation().pool_generation)
        {
            self.port.set_generation(generation);
        }
        self.port.finish(ticket, &Outcome::done(0, 0, 0));
    }
}
