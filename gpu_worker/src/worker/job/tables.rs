//! Changes of tables and owner sets: Keep, Retain, and what an Upload leaves (R57, R59).

use kvsluice_layout::ids::{DecoderLayer, GroupId};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, RetainMode, RowRecord};
use kvsluice_layout::refusal::Refusal;
use kvsluice_transport::port::Outcome;

use super::{Hands, Job, Next, rows};
use crate::device::{Device, Fragment, Queue, TableError};
use crate::tables::{NewTable, StageError, Staged, TableFault};

impl Job {
    /// Keep and Retain: stages the new tables, moves bytes where the plan says so, and has the device swap its image.
    pub(super) fn start_tables<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let mut staged = match hands.tables.stage(plan.request(), &plan.operation()) {
            Ok(staged) => staged,
            Err(StageError::Busy) => return Next::Wait,
            Err(error) => return Next::Finish(Outcome::rejected(refusal_of_stage(&error))),
        };
        if let Err(refusal) = stage_rows(plan, &mut staged) {
            hands.tables.discard(staged);
            return Next::Finish(Outcome::rejected(refusal));
        }
        if plan.kind() == Kind::Keep && !plan.is_last_of_request() {
            // Metadata only: the image on the device stays (R42).
            return self.swap(hands, staged);
        }
        if hands.is_taken(Queue::CopyIn) {
            hands.tables.discard(staged);
            return Next::Wait;
        }
        match self.enqueue_tables(plan, hands, &staged) {
            Ok(true) => {
                hands.take(Queue::CopyIn, self.ticket.position());
                self.staged = Some(staged);
                self.close_submits(hands, Queue::CopyIn)
            }
            Ok(false) => {
                hands.tables.discard(staged);
                Next::NoRoom
            }
            Err(refusal) => {
                hands.tables.discard(staged);
                Next::Finish(Outcome::rejected(refusal))
            }
        }
    }

    /// Enqueues the new image, then the moves, behind the last reader (R57). False where there is no room yet; nothing
    /// that cannot be enqueued again was.
    fn enqueue_tables<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        hands: &mut Hands<D>,
        staged: &Staged,
    ) -> Result<bool, Refusal> {
        let moves = plan.mode() == Some(RetainMode::ByteMove);
        for (at, row) in plan.rows().iter().enumerate().filter(|_| moves) {
            order_row(plan, hands, at, row)?; // refused before the first move
        }
        if !planted("r57_no_reader_fence") && !hands.fence(Queue::CopyIn) {
            return Ok(false);
        }
        staged.image(&mut hands.image);
        match hands.device.write_table(Queue::CopyIn, staged.slot(), &hands.image) {
            Ok(()) => {}
            Err(TableError::Slot { .. } | TableError::TooLong { .. }) => return Err(rows(0)),
            Err(TableError::Busy { .. } | TableError::Full { .. } | TableError::Lost(_)) => return Ok(false),
        }
        for (at, row) in plan.rows().iter().enumerate().filter(|_| moves) {
            order_row(plan, hands, at, row)?;
            self.submit_moves(hands, row);
        }
        Ok(true)
    }

    fn submit_moves<D: Device>(&mut self, hands: &mut Hands<D>, row: &RowRecord) {
        let Hands {
            moves,
            map,
            rank,
            planner,
            device,
            counts,
            ..
        } = hands;
        let Some(order) = moves.get_mut(row.group as usize) else {
            return;
        };
        let planes = map.planes(*rank, DecoderLayer(row.layer));
        for batch in order.batches() {
            planner.clear();
            planner.moves(planes, batch);
            for fragments in planner.fragments().chunks(device.submit_max()) {
                if let Err(error) = device.submit(Queue::CopyIn, fragments) {
                    // Some moves may have run: the operation has failed, and its blocks are undefined.
                    tracing::error!(rank = rank.0, position = %self.ticket.position(), %error, "moves");
                    self.failed = true;
                    return;
                }
                let bytes: u64 = fragments.iter().map(Fragment::bytes).sum();
                self.bytes += bytes;
                counts.fragments += fragments.len() as u64;
            }
        }
    }

    fn swap<D: Device>(&mut self, hands: &mut Hands<D>, staged: Staged) -> Next {
        match hands.tables.swap(staged) {
            Some(swapped) => Next::Finish(Outcome::done(self.bytes, 0, swapped.digest)),
            None => Next::Finish(Outcome::superseded(true, self.bytes)),
        }
    }

    /// All bytes are where the plan wants them: tables and owner sets follow.
    pub(super) fn apply<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if let Some(staged) = self.staged.take() {
            return self.swap(hands, staged);
        }
        match plan.kind() {
            Kind::Upload => self.own(plan, hands),
            _ => Next::Finish(Outcome::done(self.bytes, 0, 0)),
        }
    }

    /// The written blocks belong to the request from now on; its tables do not name them yet.
    fn own<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let mut staged = match hands.tables.stage(plan.request(), &plan.operation()) {
            Ok(staged) => staged,
            Err(StageError::Busy) => return Next::Wait, // the request's other change ends first
            Err(error) => return Next::Finish(Outcome::rejected(refusal_of_stage(&error))),
        };
        for (at, row) in plan.rows().iter().enumerate() {
            let blocks = plan.pairs(row).iter().map(|pair| pair.destination);
            if staged.own(GroupId(row.group), blocks).is_err() {
                hands.tables.discard(staged);
                return Next::Finish(Outcome::rejected(rows(at)));
            }
        }
        self.swap(hands, staged)
    }
}

/// Orders the moves of one row in the group's [`MoveOrder`](crate::moves::MoveOrder).
fn order_row<D: Device>(plan: &Plan<'_>, hands: &mut Hands<D>, at: usize, row: &RowRecord) -> Result<(), Refusal> {
    let null = hands
        .map
        .geometry()
        .group(GroupId(row.group))
        .and_then(|group| group.device_null);
    // The null block holds nothing that anybody reads: it serves where a cycle needs a scratch block.
    let scratch: Vec<u32> = null.iter().map(|block| block.0).collect();
    let order = hands.moves.get_mut(row.group as usize).ok_or_else(|| rows(at))?;
    order.order(plan.pairs(row), &scratch).map_err(|_| rows(at))
}

/// Applies the rows of a Keep or Retain to a staged state.
fn stage_rows(plan: &Plan<'_>, staged: &mut Staged) -> Result<(), Refusal> {
    for (at, row) in plan.rows().iter().enumerate() {
        let table = NewTable {
            pairs: plan.pairs(row),
            tags: plan.tags(row),
            valid_tokens: row.valid_tokens,
        };
        let (layer, group) = (DecoderLayer(row.layer), GroupId(row.group));
        let applied = match plan.mode() {
            Some(RetainMode::SharedTable) => staged.remap_shared(group, table),
            Some(RetainMode::LayerTables) => staged.remap_layer(layer, table),
            Some(RetainMode::ByteMove) => staged.move_layer(layer, table),
            None => Ok(()),
        };
        applied.map_err(|fault| refusal_of_table(at, &fault))?;
    }
    if plan.kind() == Kind::Retain {
        for (at, row) in plan.rows().iter().enumerate() {
            staged
                .own_only_named(GroupId(row.group))
                .map_err(|fault| refusal_of_table(at, &fault))?; // R55
        }
    }
    if plan.is_last_of_request() {
        staged.end();
    }
    Ok(())
}

fn refusal_of_stage(error: &StageError) -> Refusal {
    match error {
        StageError::Generation { found, expected } => Refusal::StaleGeneration {
            found: found.0,
            expected: expected.0,
        },
        StageError::Epoch { found, expected } => Refusal::Revision {
            found: found.0,
            expected: expected.0,
        },
        StageError::Revision { found, least } => Refusal::Revision {
            found: found.0.0,
            expected: least.0.0,
        },
        StageError::Full { requests_max } => Refusal::Requests {
            found: *requests_max,
            most: *requests_max,
        },
        StageError::Busy => Refusal::Revision { found: 0, expected: 0 },
    }
}

fn refusal_of_table(at: usize, fault: &TableFault) -> Refusal {
    match fault {
        TableFault::Slot { slot, expected, .. } => Refusal::Table {
            row: at as u32,
            slot: *slot,
            found: expected.0,
        },
        _ => rows(at),
    }
}
