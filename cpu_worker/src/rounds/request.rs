//! One request while it is played: what it holds, what it wants, and the step that it is at.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, LogicalBlock, MapRevision, OperationId, PoolGeneration, RequestEpoch, SelectionRevision,
    TokenCount,
};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::Terminal;

use super::layers::{LayerPlan, Need};
use super::options::{Agreement, WorkloadOptions};
use super::report::RoundRecord;
use super::scores::{Purpose, draw, token_scores};
use crate::ledger::{Operation, Pending};
use crate::residency::Residency;
use crate::retain_steps::{Quiet, Retention};
use crate::selection::LayerSelection;
use crate::selector::{SelectError, SelectInput, Selector};
use crate::store::BlockTag;
use crate::trace::{TRACE_BLOCK_TOKENS, TraceRequest};

/// What the ids of a trace's requests begin with; the number follows.
const ID_PREFIX: &str = "request-";

/// Why a request ends, and what follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// It has played its rounds, or was told to finish.
    Finished,
    /// The device failed it too often.
    Failed,
    /// It gives its blocks back and begins again.
    Preempted,
}

/// The step that a request is at. Steps without a transfer in flight are taken as soon as there is room for them.
#[derive(Debug)]
pub(super) enum Step {
    /// To select, plan and upload.
    Upload,
    /// An upload or a Keep is in flight.
    Uploading(Box<Transfer>),
    /// The upload is committed: to retain.
    Retain,
    /// A Retain is in flight.
    Retaining(Box<Retaining>),
    /// To drop the tables.
    End(Ending),
    /// The last record is in flight.
    Ended(Ending),
}

/// An upload in flight.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) operation: Operation<Pending>,
    /// How the upload ended.
    pub(super) terminal: Option<Terminal>,
    /// An Abort of it is in flight: nothing is settled before both ended (X15).
    pub(super) aborting: bool,
    /// The tables are replaced and not appended to (R32).
    pub(super) replaces: bool,
}

/// A retention in flight.
#[derive(Debug)]
pub(super) struct Retaining {
    pub(super) operation: Operation<Pending>,
    pub(super) retention: Retention<Quiet>,
    pub(super) affected: Vec<DecoderLayer>,
}

/// One request.
#[derive(Debug)]
pub(super) struct Request {
    /// Number in the trace.
    pub(super) number: u64,
    /// The opaque id.
    pub(super) id: Vec<u8>,
    /// Tags of the whole blocks of the sequence.
    tags: Vec<BlockTag>,
    /// Share of a block that the partial tail fills.
    partial: f64,
    /// The layers of a group rank alike.
    per_group: bool,
    pub(super) round: u32,
    pub(super) step: Step,
    pub(super) residency: Residency,
    /// Highest operation id used.
    pub(super) operation: OperationId,
    /// Highest revisions that a rank may be at: also of an upload that some ranks had done when it was aborted.
    pub(super) issued: (MapRevision, SelectionRevision),
    /// The selection of this round; a retry uses it again (R47).
    pub(super) selection: Vec<LayerSelection>,
    /// Whole blocks of the sequence in this round.
    pub(super) blocks: BlockCount,
    /// By planned layer: slots of the table that the devices hold. Later slots are new to them.
    pub(super) device_slots: Vec<u32>,
    /// Times that the device failed.
    pub(super) failures: u32,
    /// The request has finished: no more rounds.
    pub(super) finished: bool,
    pub(super) record: RoundRecord,
}

impl Request {
    /// The request `number` of a trace, whose sequence is cut to `blocks_max` blocks.
    pub(super) fn new(number: u64, trace: &TraceRequest, blocks_max: u32, options: &WorkloadOptions) -> Self {
        let whole = trace.whole_blocks().min(blocks_max) as usize;
        let per_group = match options.agreement {
            Agreement::PerLayer => false,
            Agreement::PerGroup => true,
            Agreement::Mixed => draw(options.seed, Purpose::Agreement, &[number]) < 0.5,
        };
        Self {
            number,
            id: format!("{ID_PREFIX}{number}").into_bytes(),
            tags: trace.hash_ids.iter().take(whole).map(|hash| BlockTag(*hash)).collect(),
            partial: f64::from(trace.input_length % TRACE_BLOCK_TOKENS) / f64::from(TRACE_BLOCK_TOKENS),
            per_group,
            round: 0,
            step: Step::Upload,
            residency: Residency::new(RequestEpoch(0), PoolGeneration(0), []),
            operation: OperationId(0),
            issued: (MapRevision(0), SelectionRevision(0)),
            selection: Vec::new(),
            blocks: BlockCount(0),
            device_slots: Vec::new(),
            failures: 0,
            finished: false,
            record: RoundRecord::default(),
        }
    }

    /// Begins a life: nothing is resident, and the round that was being played is played again.
    pub(super) fn begin(&mut self, epoch: RequestEpoch, generation: PoolGeneration, layers: &[LayerPlan]) {
        self.residency = Residency::new(epoch, generation, layers.iter().map(|layer| (layer.layer, layer.group)));
        self.operation = OperationId(0);
        self.issued = (MapRevision(0), SelectionRevision(0));
        self.step = if self.finished {
            Step::End(Ending::Finished)
        } else {
            Step::Upload
        };
        self.device_slots = vec![0; layers.len()];
        self.selection.clear();
    }

    /// Goes on with what an earlier producer made resident, in the first round whose sequence has all of it.
    pub(super) fn resume(&mut self, residency: Residency, rounds: u32) {
        let tables = residency.tables();
        let held = tables.iter().flat_map(|table| table.logical_by_slot()).flatten();
        let needed = held.map(|block| block.get() + 1).max().unwrap_or(0);
        let to_come = self.blocks_max().saturating_sub(needed);
        self.round = rounds.saturating_sub(1).saturating_sub(to_come);
        self.device_slots = tables.iter().map(|table| table.valid().get()).collect();
        self.residency = residency;
    }

    /// The number of the request with this id, where it is one of a trace.
    pub(super) fn number_of(id: &[u8]) -> Option<u64> {
        let number = std::str::from_utf8(id).ok()?.strip_prefix(ID_PREFIX)?;
        number.parse().ok().filter(|found: &u64| found.to_string() == number)
    }

    /// The tag of a block of the sequence.
    pub(super) fn tag(&self, block: LogicalBlock) -> Option<BlockTag> {
        self.tags.get(block.index()).copied()
    }

    /// Whole blocks of the whole sequence.
    pub(super) fn blocks_max(&self) -> u32 {
        self.tags.len() as u32
    }

    /// True where the request holds blocks that it could give back and bring again.
    pub(super) fn can_begin_again(&self) -> bool {
        let named = self.residency.tables().iter().any(|table| !table.named().is_empty());
        let holds = named || (!self.residency.replaced().is_empty() && !planted("x25_unnamed_blocks_are_overlooked"));
        holds && matches!(self.step, Step::Upload | Step::Retain)
    }

    /// Makes the selection of the round, once: the sequence grows by a block a round up to its length, full-attention
    /// layers rank its blocks, sliding-window layers want their window.
    ///
    /// # Errors
    /// As [`Selector::select`].
    pub(super) fn select(
        &mut self,
        layers: &[LayerPlan],
        options: &WorkloadOptions,
        selector: &mut Selector,
        scores: &mut Vec<f64>,
    ) -> Result<(), SelectError> {
        if !self.selection.is_empty() {
            return Ok(()); // R47
        }
        let to_come = options.rounds.saturating_sub(1).saturating_sub(self.round);
        let blocks = self.blocks_max().saturating_sub(to_come).max(self.blocks_max().min(1));
        self.blocks = BlockCount(blocks);
        self.record = RoundRecord {
            request: self.number,
            epoch: self.residency.request_epoch().get(),
            round: self.round,
            sequence_blocks: blocks,
            ..RoundRecord::default()
        };
        for plan in layers {
            let partial = (self.partial * f64::from(plan.block_tokens)) as u32;
            let tokens = blocks * plan.block_tokens + partial;
            let (logical_blocks, ranked_tail) = match plan.need {
                Need::Window { tokens: window } => {
                    // R61: the window is no selection, and never cleared by one.
                    let first = tokens.saturating_sub(window) / plan.block_tokens;
                    ((first..blocks).map(LogicalBlock).collect(), Vec::new())
                }
                Need::Selected { budget } => {
                    let same = |other: &&LayerSelection| self.per_group && other.group == plan.group;
                    match self.selection.iter().find(same) {
                        Some(other) => (other.logical_blocks.clone(), other.ranked_tail.clone()),
                        None => {
                            let ranking = if self.per_group {
                                u64::from(plan.group.get()) | 1 << 32
                            } else {
                                plan.layer.get().into()
                            };
                            let size = (blocks, plan.block_tokens, partial);
                            token_scores(options, (self.number, ranking, self.round), size, scores);
                            let selected = selector.select(&SelectInput {
                                scores,
                                block_size: TokenCount(plan.block_tokens),
                                seq_len: TokenCount(tokens),
                                budget,
                                sink: options.sink,
                                recent: options.recent,
                            })?;
                            (selected.selected.to_vec(), selected.ranked_tail.to_vec())
                        }
                    }
                }
            };
            self.selection.push(LayerSelection {
                layer: plan.layer,
                group: plan.group,
                logical_blocks,
                ranked_tail,
            });
        }
        Ok(())
    }
}
