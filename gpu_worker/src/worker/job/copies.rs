//! Copies between host and device: Upload and WriteBack.

use kvsluice_layout::ids::{DecoderLayer, GroupId, PhysicalBlock};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, RowRecord};
use kvsluice_layout::refusal::Refusal;
use kvsluice_transport::port::Outcome;

use super::{Hands, Job, Next, Stage};
use crate::device::{Device, Fragment, Queue, SubmitError};
use crate::readers::StartError;

impl Job {
    pub(super) fn start_upload<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if hands.is_taken(Queue::CopyIn) {
            return Next::Wait;
        }
        let writer = match self.writer {
            Some(writer) => writer,
            None => match hands.readers.open() {
                Ok(writer) => *self.writer.insert(writer),
                Err(_) => return Next::Wait,
            },
        };
        let destinations = plan.rows().iter().flat_map(|row| {
            let group = GroupId(row.group);
            plan.pairs(row)
                .iter()
                .map(move |pair| (group, PhysicalBlock(pair.destination)))
        });
        match hands
            .readers
            .start(&mut hands.device, Queue::CopyIn, writer, destinations)
        {
            Ok(()) => {}
            // Held by a reader without a fence (X18), or no room: try again. A lost device is seen by the step.
            Err(StartError::Held { .. }) => return Next::Wait,
            Err(StartError::Record(_) | StartError::Wait(_)) => return Next::NoRoom,
            Err(StartError::Unknown { .. }) => return Next::Finish(Outcome::failed()),
        }
        hands.take(Queue::CopyIn, self.ticket.position());
        self.stage = Stage::Submitting { row: 0, fragment: 0 };
        Next::Worked
    }

    pub(super) fn start_write_back<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let (slots, _) = hands.write_back_slots;
        let pairs: u64 = plan.rows().iter().map(|row| u64::from(row.valid)).sum();
        let from = plan.header().target;
        let to = from.saturating_add(pairs);
        if to > slots || hands.write_back.is_none() {
            return Next::Finish(Outcome::rejected(Refusal::WriteBackRange { from, to, slots }));
        }
        if hands.is_taken(Queue::CopyOut) {
            return Next::Wait;
        }
        // D6: a copy to the host starts behind the compute that made its bytes.
        if !planted("d6_no_compute_fence") && !hands.fence(Queue::CopyOut) {
            return Next::NoRoom;
        }
        hands.take(Queue::CopyOut, self.ticket.position());
        self.stage = Stage::Submitting { row: 0, fragment: 0 };
        Next::Worked
    }

    /// Submits rows until the queue is full; the event goes behind the last one.
    pub(super) fn submit<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        hands: &mut Hands<D>,
        row: usize,
        fragment: usize,
    ) -> Next {
        let queue = if plan.kind() == Kind::WriteBack {
            Queue::CopyOut
        } else {
            Queue::CopyIn
        };
        let mut worked = false;
        let mut skip = fragment;
        for (at, record) in plan.rows().iter().enumerate().skip(row) {
            if self.superseded {
                break;
            }
            self.plan_row(plan, hands, at, record);
            let mut rest = hands.planner.fragments().get(skip..).unwrap_or(&[]);
            let mut most = hands.device.submit_max();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(most));
                match hands.device.submit(queue, now) {
                    Ok(()) => {
                        worked = true;
                        skip += now.len();
                        hands.counts.fragments += now.len() as u64;
                        self.bytes += now.iter().map(Fragment::bytes).sum::<u64>();
                        rest = later;
                    }
                    Err(SubmitError::Full { free, .. }) if free > 0 && free < now.len() => most = free,
                    Err(SubmitError::Full { .. }) => {
                        self.stage = Stage::Submitting {
                            row: at,
                            fragment: skip,
                        };
                        return if worked { Next::Worked } else { Next::NoRoom };
                    }
                    Err(error) => {
                        tracing::error!(rank = hands.rank.0, position = %self.ticket.position(), %error, "submit");
                        self.failed = true;
                        rest = &[];
                    }
                }
            }
            skip = 0;
            if self.failed {
                break;
            }
            if let Some(writer) = self.writer
                && let Ok(event) = hands.device.record(Queue::CopyIn)
                && let Err(event) = hands.readers.layer_ready(writer, DecoderLayer(record.layer), event)
            {
                hands.device.release(event);
            }
        }
        self.close_submits(hands, queue)
    }

    fn plan_row<D: Device>(&self, plan: &Plan<'_>, hands: &mut Hands<D>, at: usize, record: &RowRecord) {
        hands.planner.clear();
        let pairs = plan.pairs(record);
        let planes = hands.map.planes(hands.rank, DecoderLayer(record.layer));
        match (plan.kind(), &hands.write_back) {
            (Kind::WriteBack, Some(area)) => {
                let before: u64 = plan.rows().iter().take(at).map(|row| u64::from(row.valid)).sum();
                let (_, slot_bytes) = hands.write_back_slots;
                let first = plan.header().target.saturating_add(before).saturating_mul(slot_bytes);
                hands.planner.write_back(area, first, slot_bytes, planes, pairs);
            }
            _ => {
                hands.planner.upload(&hands.pool, planes, pairs);
            }
        }
    }
}
