//! A new producer takes over, and adopts what all ranks hold alike (X25).

use kvsluice_layout::ids::{DecoderLayer, GroupId, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planted::planted;
use kvsluice_transport::counting::until_crash;
use kvsluice_transport::producer::Producer;

use super::{Place, Process, World};
use crate::sim::client::{Client, Mode, Request};
use crate::sim::model::{Violation, check};
use crate::sim::seat::Seat;
use crate::sim::shape::{GROUPS, LAYERS};

impl World {
    /// A new producer takes over from a dead one, with the workers that live.
    pub(in crate::sim) fn take_over(&mut self) -> Result<(), Violation> {
        let epoch = self.epoch();
        let mut survivors = Vec::new();
        let mut alive = Vec::new();
        let mut client = Client::new(Mode::Recovering, self.epochs << 16);
        for (rank, place) in (0..).zip(&mut self.places) {
            let Place::Alive(seat) = place else {
                *place = Place::Empty;
                alive.push(None);
                continue;
            };
            seat.handshakes.push_back(epoch);
            survivors.push((Rank(rank), seat.segment.heap().clone(), seat.epoch, 100 + rank));
            alive.push(Some(seat.epoch.0));
            for view in seat.tables().export() {
                for (group, foreign) in (0..).zip(&mut client.foreign) {
                    foreign.extend(view.owned(GroupId(group)));
                }
            }
        }
        self.model.takes_over(epoch.0, &alive);
        for one in self.model.journal_uses() {
            client
                .foreign
                .get_mut(one.group as usize)
                .into_iter()
                .for_each(|foreign| {
                    foreign.insert(one.block);
                });
        }
        self.history.add("a producer takes over", epoch.0, self.model.tail);
        let (control, regions) = (self.control.clone(), self.shape.regions.clone());
        let leases = LeaseTable::new(&self.shape.map);
        let taken = until_crash(|| Producer::take_over(control, regions, leases, epoch, survivors));
        let producer = match taken {
            None => return self.producer_died(),
            Some(Err(error)) => {
                return check(false, "X25 a journal that a producer wrote can be read", || {
                    error.to_string()
                });
            }
            Some(Ok(producer)) => producer,
        };
        self.tally.takeovers += 1;
        self.observe_producer(false)?;
        let members: Vec<(u64, u64)> = (0..self.ranks())
            .map(|rank| producer.member(Rank(rank)))
            .map(|member| (member.epoch.0, member.first.0))
            .collect();
        self.model
            .took_over(producer.tail().0, producer.in_flight(), &members)?;
        // A worker that joined as its producer died is not a member: it drains and starts again.
        for rank in 0..self.ranks() {
            if self
                .seat(rank)
                .is_some_and(|seat| self.model.seated(rank) != Some(seat.epoch.0))
            {
                self.kill(rank);
                self.set(rank, Place::Empty);
            }
        }
        self.producer = Some(Process { producer, client });
        if planted("x25_republish") {
            self.republish()?;
        }
        Ok(())
    }

    /// A successor that does not trust the journal, and publishes what it finds there once more.
    pub(super) fn republish(&mut self) -> Result<(), Violation> {
        let Some(spec) = self.model.first_open() else {
            return Ok(());
        };
        spec.draft(&mut self.draft);
        let draft = std::mem::take(&mut self.draft);
        let position = self.produce(false, |producer| producer.enqueue(&draft))?;
        self.draft = draft;
        if let Some(Ok(position)) = position {
            let generation = spec.generation;
            self.model.accepted(spec, position.0, generation)?;
            self.produce(true, Producer::flush)?;
        }
        Ok(())
    }

    /// After a takeover, once the journal is empty: adopts what all ranks report alike, or resets (X25).
    pub(super) fn recover(&mut self) -> Result<(), Violation> {
        let Some(process) = &self.producer else { return Ok(()) };
        if process.client.mode != Mode::Recovering || process.producer.in_flight() > 0 || !process.client.is_idle() {
            return Ok(());
        }
        let wanted = self.random.u8(0..4) != 0;
        let found = if wanted && process.producer.closed().is_none() {
            self.reported()
        } else {
            None
        };
        let Some(process) = &mut self.producer else {
            return Ok(());
        };
        process.client.mode = match found {
            None => Mode::NeedsReset,
            Some(requests) => {
                self.tally.adopted += 1;
                for (name, request) in requests {
                    process.client.adopt(name, request);
                }
                process
                    .client
                    .foreign
                    .iter_mut()
                    .for_each(std::collections::BTreeSet::clear);
                Mode::Running
            }
        };
        if process.client.mode == Mode::Running {
            self.audit();
        }
        let Some(process) = &self.producer else { return Ok(()) };
        self.history
            .add("recovered", u64::from(process.client.mode == Mode::Running), 0);
        Ok(())
    }

    /// Every device is asked for the tables that its worker reports.
    pub(super) fn audit(&self) {
        (0..self.ranks())
            .filter_map(|rank| self.seat(rank))
            .for_each(Seat::launch_auditor);
    }

    /// The requests that the workers report, where all of them report the same and are sound.
    pub(super) fn reported(&self) -> Option<Vec<(Vec<u8>, Request)>> {
        let mine = &self.producer.as_ref()?.client.requests;
        let first = self.seat(0)?.tables();
        let mut requests = Vec::new();
        for rank in 0..self.ranks() {
            let tables = self.seat(rank)?.tables();
            let alike = tables.export().count() == first.export().count()
                && first.export().all(|view| {
                    tables
                        .get(view.request())
                        .is_some_and(|other| other.digest() == view.digest())
                });
            if !alike || !self.model.is_sound(rank) {
                return None;
            }
        }
        for view in first.export().filter(|view| !mine.contains_key(view.request())) {
            let owned: Vec<std::collections::BTreeSet<u32>> = (0..GROUPS as u32)
                .map(|group| view.owned(GroupId(group)).iter().copied().collect())
                .collect();
            let known = (0..)
                .zip(&owned)
                .all(|(group, owned)| owned.iter().all(|block| self.model.device_tag(group, *block).is_some()));
            let tables = (0..LAYERS.len() as u32).map(|layer| {
                let table = first.table(view.request(), DecoderLayer(layer));
                table.map(|(blocks, _)| blocks.to_vec()).unwrap_or_default()
            });
            let request = Request {
                epoch: view.epoch().0,
                revisions: (view.map_revision().0, view.selection_revision().0),
                owned,
                tables: tables.collect(),
                busy: false,
                dirty: false,
            };
            if !known {
                return None;
            }
            requests.push((view.request().to_vec(), request));
        }
        Some(requests)
    }
}
