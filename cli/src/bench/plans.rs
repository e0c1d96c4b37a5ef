//! The plans that are sent: uploads that look like those of a serving engine.

use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, OperationId, PoolGeneration, RequestEpoch, SourceBlock,
};
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::record::SourceKind;

/// Builds one upload after another: new operation ids, scattered sources, destinations that come around only when the
/// earlier upload of them is long done.
pub(super) struct Plans {
    draft: PlanDraft,
    request: &'static [u8],
    rows: u32,
    pairs: u32,
    source_blocks: u32,
    device_blocks: u32,
    operation: u64,
    source: u32,
    destination: u32,
}

/// Steps through block ids: primes that divide no pool, so that every block has its turn.
const SOURCE_STEP: u32 = 1237;
const DESTINATION_STEP: u32 = 773;

impl Plans {
    /// Uploads of `rows` rows (layers) with `pairs` ids each for a request of this name. Physical block 0 is the null
    /// block.
    pub(super) fn new(request: &'static [u8], rows: u32, pairs: u32) -> Self {
        Self {
            draft: PlanDraft::new(),
            request,
            rows,
            pairs,
            source_blocks: super::link::SOURCE_BLOCKS,
            device_blocks: super::link::DEVICE_BLOCKS - 1,
            operation: 0,
            source: 0,
            destination: 0,
        }
    }

    /// The next plan. Nothing is allocated once the draft has its size.
    #[inline]
    pub(super) fn next(&mut self) -> &PlanDraft {
        self.operation += 1;
        let operation = Operation {
            request_epoch: RequestEpoch(1),
            operation_id: OperationId(self.operation),
            pool_generation: PoolGeneration(1),
            ..Operation::default()
        };
        self.draft.upload(self.request, operation);
        let (mut source, first) = (self.source, self.destination);
        let mut destination = first;
        for row in 0..self.rows {
            destination = first; // Layers of one group have tensors of their own: the same blocks in each.
            let pairs = (0..self.pairs).map(|_| {
                source = wrap(source + SOURCE_STEP, self.source_blocks);
                destination = wrap(destination + DESTINATION_STEP, self.device_blocks);
                (SourceBlock(source), DestinationBlock(destination + 1))
            });
            self.draft
                .row(DecoderLayer(row), GroupId(0), SourceKind::SourceOnly, pairs);
        }
        (self.source, self.destination) = (source, destination);
        &self.draft
    }

    /// The plan that [`next`](Self::next) built last.
    pub(super) fn last(&self) -> &PlanDraft {
        &self.draft
    }

    /// Bytes of the record.
    pub(super) fn record_bytes(&mut self) -> usize {
        self.next().encoded_bytes().unwrap_or(0)
    }
}

#[inline]
fn wrap(block: u32, blocks: u32) -> u32 {
    if block >= blocks { block - blocks } else { block }
}
