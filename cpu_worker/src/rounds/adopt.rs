//! Going on where an earlier producer stood (X25): the requests that all ranks hold alike.

use std::collections::{BTreeMap, HashMap};

use kvsluice_layout::export::{RequestExport, ResidencyExport};
use kvsluice_layout::ids::{GroupId, LogicalBlock, OperationId, PhysicalBlock};
use kvsluice_transport::shared::{Shared, SharedMut};

use super::error::RoundsError;
use super::request::{Ending, Request, Step};
use super::{Mode, Rounds};
use crate::adoption::{OwnLayer, tables_of};
use crate::owner::Owners;
use crate::residency::Residency;
use crate::table::LayerTable;
use crate::trace::{TraceError, TraceRequest};

/// No request is changed so often.
const REVISION_END: u64 = 1 << 56;

/// What became of the requests that the ranks hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Requests that go on with the blocks that they hold.
    pub resumed: u64,
    /// Requests that give their blocks back and begin again: what lies in them is not known.
    pub begun_again: u64,
}

impl<C, R, P, T> Rounds<C, R, P, T>
where
    C: SharedMut,
    R: Shared,
    P: SharedMut,
    T: Iterator<Item = Result<TraceRequest, TraceError>>,
{
    /// Adopts what all ranks hold alike, before the first step and once the journal has drained: no Reset is needed then,
    /// and every table stays readable throughout. `None`, and the first step resets the pools, where the report is of
    /// other requests than this workload's, of other pools, or contradicts itself.
    ///
    /// The trace is read up to the last request of the report; requests that no rank holds are played as ever.
    ///
    /// # Errors
    /// [`RoundsError`] where the trace cannot be read.
    pub fn adopt(&mut self, report: &ResidencyExport) -> Result<Option<Adopted>, RoundsError> {
        let producer = &self.hands.producer;
        if producer.in_flight() > 0 || producer.closed().is_some() || report.pool_generation != producer.generation() {
            return Ok(None);
        }
        let Some(mut owners) = self.claimed(report)? else {
            return Ok(None);
        };
        // X33: what no earlier producer can have made. Epochs order across restarts (X22).
        let incarnation = producer.incarnation().get();
        let is_plausible = |held: &RequestExport| {
            let revisions = [held.map_revision.get(), held.selection_revision.get()];
            held.epoch.get() >> 32 < incarnation && revisions.iter().all(|revision| *revision < REVISION_END)
        };
        if !report.requests.iter().all(is_plausible) {
            return Ok(None);
        }
        let numbered = report
            .requests
            .iter()
            .map(|held| Some((Request::number_of(&held.request)?, held)));
        let Some(mut held) = numbered.collect::<Option<BTreeMap<u64, &RequestExport>>>() else {
            return Ok(None);
        };
        if held.len() < report.requests.len() {
            return Ok(None); // one request twice
        }
        let until = held.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
        let mut read = Vec::new();
        while self.admitted < until
            && let Some(request) = self.next_of_trace()?
        {
            read.push(request);
        }
        if self.admitted < until {
            self.preempted.extend(read);
            return Ok(None);
        }
        let mut adopted = Adopted::default();
        for mut request in read {
            let Some(held) = held.remove(&request.number) else {
                self.preempted.push_back(request);
                continue;
            };
            if self.resume(&mut request, held, &mut owners)? {
                adopted.resumed += 1;
            } else {
                adopted.begun_again += 1;
            }
            self.ready.push_back(request.number);
            self.requests.insert(request.number, request);
        }
        self.hands.owners = owners;
        self.mode = Mode::Running;
        self.look_at_pins();
        Ok(Some(adopted))
    }

    /// Owners in which every request has what it holds. `None` where two hold one block, or a block is none.
    fn claimed(&self, report: &ResidencyExport) -> Result<Option<Owners>, RoundsError> {
        let mut owners = Owners::of_geometry(self.hands.map.geometry())?;
        for held in &report.requests {
            for (group, of) in (0..).map(GroupId).zip(&held.groups) {
                let blocks: Vec<PhysicalBlock> = of.owned.iter().copied().map(PhysicalBlock).collect();
                if owners.of(group).and_then(|owner| owner.claim(&blocks)).is_err() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(owners))
    }

    /// Gives a request what it holds. False where what lies in its blocks is not known: it ends, and begins again.
    fn resume(
        &mut self,
        request: &mut Request,
        held: &RequestExport,
        owners: &mut Owners,
    ) -> Result<bool, RoundsError> {
        let hands = &mut self.hands;
        let layers: Vec<OwnLayer> = hands
            .layers
            .iter()
            .map(|plan| (plan.layer, plan.group, plan.block_tokens))
            .collect();
        let mut places = HashMap::new();
        for block in (0..request.blocks_max()).map(LogicalBlock) {
            if let Some(tag) = request.tag(block) {
                places.entry(tag.0).or_insert(block);
            }
        }
        let tables = tables_of(held, &layers, |tag| places.get(&tag).copied());
        let (generation, revisions) = (
            hands.producer.generation(),
            (held.map_revision, held.selection_revision),
        );
        // X22: above every operation of an earlier incarnation.
        let operation = OperationId(hands.producer.incarnation().get() << 32);
        request.begin(held.epoch, generation, &hands.layers);
        (request.operation, request.issued) = (operation, revisions);
        let of_groups = (0..).map(GroupId).zip(&held.groups);
        let owned = of_groups.flat_map(|(group, of)| of.owned.iter().map(move |block| (group, PhysicalBlock(*block))));
        let known = tables.is_some();
        let unnamed = || {
            hands
                .layers
                .iter()
                .map(|plan| LayerTable::empty(plan.layer, plan.group))
                .collect()
        };
        let tables = tables.unwrap_or_else(unnamed);
        let residency = Residency::resumed(held.epoch, generation, revisions, tables, owned.collect(), owners)?;
        request.resume(residency, hands.options.rounds);
        if known {
            hands.ledger.resume(&request.id, held.epoch, revisions.0, revisions.1)?;
        } else {
            request.step = Step::End(Ending::Preempted);
        }
        Ok(known)
    }
}
