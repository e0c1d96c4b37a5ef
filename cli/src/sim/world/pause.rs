//! A pause: everything ends, and what is left must be nothing.

use kvsluice_layout::ids::{DecoderLayer, GroupId};

use super::World;
use crate::sim::client::Mode;
use crate::sim::model::{Violation, check};
use crate::sim::seat::Seat;

impl World {
    /// Brings every rank back and looks whether everything has ended. True once it has.
    pub(in crate::sim) fn is_settled(&mut self) -> Result<bool, Violation> {
        if self.producer.is_none() {
            self.take_over()?;
        }
        for rank in 0..self.ranks() {
            while self.shake_hands(rank) {}
            if self.seat(rank).is_some() && !self.model.is_sound(rank) {
                self.kill(rank); // expelled
            }
            self.lose(rank)?;
            self.join(rank)?;
        }
        self.reset_where_due()?;
        self.flush()?;
        self.poll(true)?;
        let Some(process) = &self.producer else {
            return Ok(false);
        };
        let open: usize = (0..self.ranks())
            .filter_map(|rank| self.seat(rank))
            .map(Seat::open_operations)
            .sum();
        Ok(process.producer.in_flight() == 0
            && process.client.mode == Mode::Running
            && process.producer.closed().is_none()
            && open == 0)
    }

    /// Who holds what, for the message of a pause that does not end.
    pub(in crate::sim) fn stuck(&self) -> String {
        let process = self.producer.as_ref();
        let oldest = process.and_then(|process| process.producer.oldest());
        let mode = process.map(|process| process.client.mode);
        let open = |rank| self.seat(rank).map(Seat::open_operations);
        let open: Vec<Option<usize>> = (0..self.ranks()).map(open).collect();
        format!("{mode:?}, oldest {oldest:?}, open per rank {open:?}")
    }

    /// Checks what must hold when nothing is in flight.
    pub(in crate::sim) fn check_settled(&mut self) -> Result<(), Violation> {
        self.tally.drains += 1;
        self.audit();
        self.model.drained()?;
        let Some(process) = &self.producer else { return Ok(()) };
        let leased = process.producer.leases().leased_blocks();
        check(leased == 0, "F12 leases return when everything has ended", || {
            format!("{leased} blocks are leased")
        })?;
        let (reclaim, tail) = (process.producer.reclaim().0, process.producer.tail().0);
        check(
            reclaim == tail && tail == self.model.tail,
            "F12 ring space returns when everything has ended",
            || format!("reclaim {reclaim}, tail {tail}, expected {}", self.model.tail),
        )?;
        for (name, request) in &process.client.requests {
            for rank in 0..self.ranks() {
                let Some(tables) = self.seat(rank).map(Seat::tables) else {
                    continue;
                };
                let said = |what: &str| format!("rank {rank}, {}: {what}", String::from_utf8_lossy(name));
                let view = tables.get(name);
                let digest = view.map(|view| view.digest());
                let first = self
                    .seat(0)
                    .and_then(|seat| seat.tables().get(name))
                    .map(|view| view.digest());
                if request.dirty {
                    continue;
                }
                check(digest == first, "I9 the tables of all ranks are equal", || {
                    said("another digest")
                })?;
                for (layer, table) in (0..).zip(&request.tables) {
                    let found = tables
                        .table(name, DecoderLayer(layer))
                        .map_or(&[][..], |(blocks, _)| blocks);
                    check(found == table, "R57 the tables are those that were committed", || {
                        said(&format!("layer {layer}: {found:?}, expected {table:?}"))
                    })?;
                }
                for (group, owned) in (0..).zip(&request.owned) {
                    let found = view.map_or(&[][..], |view| view.owned(GroupId(group)));
                    let same = found.iter().eq(owned);
                    check(same, "R55 a request owns what was committed", || {
                        said(&format!("group {group}: {found:?}, expected {owned:?}"))
                    })?;
                }
            }
        }
        Ok(())
    }
}
