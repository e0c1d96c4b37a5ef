//! A rank's end of the ring: `Port::receive` over a ring of any bytes that change while they are read.

use std::cell::RefCell;

use kvsluice_layout::ids::{Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_transport::port::{Incoming, Outcome, Port};
use kvsluice_transport::shared::{Shared, SharedMut};

use super::channel::{Channel, PRODUCER, USED_BYTES, dress};
use super::input::{Input, words};
use super::memory::{Change, Shifting};
use super::soundness::assert_sound;

thread_local! {
    static CHANNEL: RefCell<Channel> = RefCell::new(Channel::new());
}

/// First byte: which records the producer takes the trouble to seal; second: which ones the worker leaves open.
pub fn port(data: &[u8]) {
    let mut input = Input(data);
    let (sealed, open) = (input.byte(), input.byte());
    CHANNEL.with_borrow(|channel| {
        let changes = Change::read(&mut input, &channel.control_places());
        let mut ring = words(input.bytes(USED_BYTES));
        ring.resize(ring.len().next_multiple_of(8), 0);
        dress(&mut ring, 0, sealed);
        channel.control.copy_in(channel.shape.at, &ring);
        receive_all(channel, Shifting::new(&channel.control, changes), open);
        // The next input starts on an empty ring.
        channel.clear();
    });
}

/// Takes every record that a port takes. Those of the bits in `open` are answered at the end.
pub(super) fn receive_all(channel: &Channel, control: impl Shared, open: u8) {
    let leases = LeaseTable::new(&channel.map);
    let rank = channel.ranks[0].clone();
    let mut port = Port::new(
        control,
        rank,
        channel.shape,
        leases,
        ProcessEpoch(2),
        PRODUCER,
        Position(0),
    );
    let mut held = Vec::new();
    for record in 0..USED_BYTES / 64 {
        match port.receive() {
            Ok(Some(Incoming::Plan(ticket))) => {
                let plan = port.plan(&ticket).expect("an accepted plan stays one");
                assert_sound(&channel.map, &plan);
                if open >> (record % 8) & 1 == 1 {
                    held.push(ticket);
                } else {
                    port.finish(ticket, &Outcome::done(0, 0, 0));
                }
            }
            Ok(Some(Incoming::Rejected { .. })) => {}
            Ok(Some(Incoming::AwaitHandshake(_)) | None) | Err(_) => break,
        }
    }
    for ticket in held {
        let plan = port.plan(&ticket).expect("an open record stays as it was");
        assert_sound(&channel.map, &plan);
        port.finish(ticket, &Outcome::done(0, 0, 0));
    }
    assert_eq!(port.unanswered(), 0);
}
