//! A plan as the workload means it: what is drafted from it, and what the checker compares the ring with.

use kvsluice_layout::ids::{
    GroupId, MapRevision, OperationId, PoolGeneration, Position, RequestEpoch, SelectionRevision,
};
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::record::{Kind, Pair, RetainMode};

use super::shape::DEVICE_BLOCKS;

/// One row.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecRow {
    /// Layer, `u32::MAX` for all of the group.
    pub(super) layer: u32,
    pub(super) group: u32,
    pub(super) source_kind: u16,
    pub(super) valid_tokens: u32,
    /// (source, destination, tag). Those from `valid` on are carried and ignored.
    pub(super) pairs: Vec<(u32, u32, u64)>,
    pub(super) valid: usize,
}

/// One plan.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) mode: Option<RetainMode>,
    pub(super) request: Vec<u8>,
    pub(super) epoch: u64,
    pub(super) operation: u64,
    pub(super) generation: u64,
    /// Revisions g and r.
    pub(super) revisions: (u64, u64),
    pub(super) target: u64,
    pub(super) last: bool,
    pub(super) rows: Vec<SpecRow>,
}

/// A block of one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Use {
    pub(super) group: u32,
    /// On the device, else in the host pool.
    pub(super) device: bool,
    pub(super) block: u32,
    pub(super) writes: bool,
}

impl Spec {
    pub(super) fn draft(&self, draft: &mut PlanDraft) {
        let operation = Operation {
            request_epoch: RequestEpoch(self.epoch),
            operation_id: OperationId(self.operation),
            pool_generation: PoolGeneration(self.generation),
            map_revision: MapRevision(self.revisions.0),
            selection_revision: SelectionRevision(self.revisions.1),
        };
        let request = self.request.as_slice();
        match self.kind {
            Kind::Upload => draft.upload(request, operation),
            Kind::Retain => draft.retain(request, operation, self.mode.unwrap_or(RetainMode::SharedTable)),
            Kind::WriteBack => draft.write_back(request, operation, self.target),
            Kind::Abort => draft.abort(request, operation, Position(self.target)),
            Kind::Reset => draft.reset(operation.pool_generation),
            Kind::Keep | Kind::Padding => draft.keep(request, operation),
        };
        if self.last {
            draft.last_of_request();
        }
        for row in &self.rows {
            let pairs = row
                .pairs
                .iter()
                .map(|&(source, destination, _)| Pair { source, destination });
            draft.raw_row(
                row.layer,
                GroupId(row.group).0,
                row.source_kind,
                row.valid_tokens,
                pairs,
            );
            draft.valid(row.valid as u32);
            draft.tags(row.pairs.iter().map(|pair| pair.2));
        }
    }

    /// The words of the record behind its first two (commit, checksum), up to the padding of its last line. Written
    /// from docs/protocol.md, not with the encoder. The fifth word, the producer epoch, is `epoch`.
    pub(super) fn words(&self, epoch: u64, bytes: u64) -> Vec<u64> {
        let pairs = self.rows.iter().map(|row| row.pairs.len()).sum::<usize>() as u64;
        let mode = self.mode.map_or(0, |mode| mode as u64);
        let reset = self.kind == Kind::Reset;
        let number = |word| if reset { 0 } else { word };
        let request: &[u8] = if reset { b"" } else { &self.request };
        let mut words = vec![
            bytes | (self.kind as u64) << 32 | 0x0100 << 48,
            u64::from(self.last) | u64::from(pairs > 0) << 32,
            epoch,
            number(self.epoch),
            number(self.operation),
            self.generation,
            number(self.revisions.0),
            number(self.revisions.1),
            self.target,
            self.rows.len() as u64 | pairs << 32,
            request.len() as u64 | mode << 32,
            0,
            0,
            0,
        ];
        words.extend(request.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            u64::from_le_bytes(word)
        }));
        let mut first = 0;
        for row in &self.rows {
            let count = row.pairs.len() as u64;
            words.extend([
                u64::from(row.layer) | u64::from(row.group) << 32,
                u64::from(row.source_kind) | (row.valid as u64) << 32,
                first | count << 32,
                u64::from(row.valid_tokens),
            ]);
            first += count;
        }
        let pairs = || self.rows.iter().flat_map(|row| &row.pairs);
        words.extend(pairs().map(|pair| u64::from(pair.0) | u64::from(pair.1) << 32));
        words.extend(pairs().map(|pair| pair.2));
        words
    }

    /// The blocks that the plan reads and writes, each row's in order. Blocks that a table only names are read.
    pub(super) fn uses(&self) -> Vec<Use> {
        let mut uses = Vec::new();
        for row in &self.rows {
            for &(source, destination, _) in row.pairs.iter().take(row.valid) {
                let mut add = |device, block, writes| {
                    let one = Use {
                        group: row.group,
                        device,
                        block,
                        writes,
                    };
                    if !uses.contains(&one) && (!device || block < DEVICE_BLOCKS) {
                        uses.push(one);
                    }
                };
                match (self.kind, self.mode) {
                    (Kind::Upload, _) => {
                        add(false, source, false);
                        add(true, destination, true);
                    }
                    (Kind::WriteBack, _) => {
                        add(true, source, false);
                        add(false, destination, true);
                    }
                    (Kind::Retain, Some(RetainMode::ByteMove)) => {
                        add(true, source, true);
                        add(true, destination, true);
                    }
                    (Kind::Retain, _) => add(true, destination, false),
                    _ => {}
                }
            }
        }
        uses
    }

    /// True for kinds that name blocks or tables.
    pub(super) fn is_data(&self) -> bool {
        !matches!(self.kind, Kind::Abort | Kind::Reset)
    }
}
