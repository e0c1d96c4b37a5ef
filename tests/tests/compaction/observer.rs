//! A reader of the plan ring that is no member: it knows from the records themselves what every table should hold.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvsluice_layout::ids::{DecoderLayer, GroupId, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{ALL_LAYERS, Kind, RowRecord};
use kvsluice_transport::port::{Incoming, Outcome, Port};
use kvsluice_transport::producer::Producer;
use kvsluice_transport::shared::Heap;

use crate::rig::{Memory, Own};

/// By layer: the content tag of each slot.
pub(crate) type Tags = Vec<Vec<u64>>;

/// An upload as it was published, apart from what names it: its rows with their pairs and tags, and what it leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SeenUpload {
    pub(crate) request: Vec<u8>,
    pub(crate) operation_id: u64,
    /// Revisions g and r that it leads to.
    pub(crate) revisions: (u64, u64),
    /// The record's words, without its commit word, checksum and operation id.
    pub(crate) words: Vec<u64>,
}

/// What was published.
pub(crate) struct Observer {
    port: Port<Heap, Heap>,
    map: Arc<GeometryMap>,
    /// By request and selection revision r.
    tables: HashMap<Vec<u8>, BTreeMap<u64, Tags>>,
    pub(crate) uploads: Vec<SeenUpload>,
    pub(crate) kinds: HashMap<Kind, u64>,
}

impl Observer {
    pub(crate) fn new(memory: &Memory, producer: &Producer<Own, Own>) -> Self {
        let (control, segment) = (memory.control.clone(), Heap::new(memory.regions.rank_bytes()));
        let (leases, shape) = (LeaseTable::new(&memory.map), producer.shape());
        let epoch = ProcessEpoch(0x0B5);
        Self {
            port: Port::new(
                control,
                segment,
                shape,
                leases,
                epoch,
                producer.epoch(),
                producer.tail(),
            ),
            map: memory.map.clone(),
            tables: HashMap::new(),
            uploads: Vec::new(),
            kinds: HashMap::new(),
        }
    }

    pub(crate) fn accept_producer(&mut self, epoch: ProcessEpoch) {
        self.port.accept_producer(epoch);
    }

    /// Tables that the device of a rank may show which has said that `request` is at revision r: the one that stands
    /// then, or one that it is already on its way to.
    pub(crate) fn tables_from(&self, request: &[u8], r: u64) -> Vec<Tags> {
        let none = BTreeMap::new();
        let of_request = self.tables.get(request).unwrap_or(&none);
        // A Keep or an upload moves r without a table: the last table up to r still stands.
        let stands = of_request.range(..=r).next_back().map(|(_, tags)| tags.clone());
        let empty = || vec![Vec::new(); self.map.geometry().layers.len()];
        let mut tables = vec![stands.unwrap_or_else(empty)];
        tables.extend(of_request.range(r + 1..).map(|(_, tags)| tags.clone()));
        tables
    }

    /// Reads what was published since.
    pub(crate) fn look(&mut self) {
        while let Some(incoming) = self.port.receive().unwrap() {
            let ticket = match incoming {
                Incoming::Plan(ticket) => ticket,
                other => panic!("a record that no rank takes: {other:?}"),
            };
            let plan = self.port.plan(&ticket).unwrap();
            *self.kinds.entry(plan.kind()).or_default() += 1;
            match plan.kind() {
                Kind::Reset => {
                    self.tables.clear();
                    self.port
                        .set_generation(kvsluice_layout::ids::PoolGeneration(plan.header().pool_generation));
                }
                Kind::Upload => self.uploads.push(seen(&plan)),
                Kind::Retain if !plan.is_last_of_request() => note(&mut self.tables, &self.map, &plan),
                // A last record drops the tables; an id that comes back has another epoch and begins at r = 0.
                Kind::Retain => {
                    let emptied = vec![Vec::new(); self.map.geometry().layers.len()];
                    let r = plan.header().selection_revision;
                    self.tables
                        .entry(plan.request().to_vec())
                        .or_default()
                        .insert(r, emptied);
                }
                _ => {}
            }
            // Nobody waits for this reader; its leases would only stand in its own way.
            self.port.finish(ticket, &Outcome::done(0, 0, 0));
        }
    }
}

fn note(tables: &mut HashMap<Vec<u8>, BTreeMap<u64, Tags>>, map: &GeometryMap, plan: &Plan<'_>) {
    let layers = map.geometry().layers.len();
    let of_request = tables.entry(plan.request().to_vec()).or_default();
    let r = plan.header().selection_revision;
    if of_request.range(r..).next().is_some() {
        of_request.clear(); // another life of the request
    }
    let last = of_request.last_key_value().map(|(_, tags)| tags.clone());
    let mut tags = last.unwrap_or_else(|| vec![Vec::new(); layers]);
    for row in plan.rows() {
        for layer in layers_of(map, row) {
            tags[layer.index()] = plan.tags(row).to_vec();
        }
    }
    of_request.insert(r, tags);
}

fn layers_of(map: &GeometryMap, row: &RowRecord) -> Vec<DecoderLayer> {
    if row.layer != ALL_LAYERS {
        return vec![DecoderLayer(row.layer)];
    }
    let layers = (0..).zip(&map.geometry().layers);
    let of_group = layers.filter(|(_, spec)| spec.group == GroupId(row.group));
    of_group.map(|(number, _)| DecoderLayer(number)).collect()
}

fn seen(plan: &Plan<'_>) -> SeenUpload {
    let header = plan.header();
    let mut words = vec![
        header.request_epoch,
        header.pool_generation,
        header.map_revision,
        header.selection_revision,
        u64::from(header.row_count),
        u64::from(header.pair_count),
    ];
    for row in plan.rows() {
        words.extend(
            [
                row.layer,
                row.group,
                row.source_kind.into(),
                row.valid,
                row.valid_tokens,
            ]
            .map(u64::from),
        );
        words.extend(
            plan.pairs(row)
                .iter()
                .flat_map(|pair| [pair.source, pair.destination])
                .map(u64::from),
        );
        words.extend(plan.tags(row));
    }
    SeenUpload {
        request: plan.request().to_vec(),
        operation_id: header.operation_id,
        revisions: (header.map_revision, header.selection_revision),
        words,
    }
}
