//! What is in flight: the records of [reclaim, tail), each rank's answer to them, and the blocks that they lease.

use std::collections::BTreeSet;

use kvsluice_layout::ids::{Position, Rank};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::record::{Kind, RecordHeader, RetainMode, Terminal};
use kvsluice_layout::refusal::reason;
use kvsluice_layout::region::RegionMap;
use zerocopy::IntoBytes;

use super::picture::Picture;
use super::report::{AnswerReport, LeaseReport, RecordReport};
use crate::members::{Member, read_member};
use crate::recovery::{Journaled, TakeoverError, scan};
use crate::ring::RingShape;
use crate::slots::{SlotState, read_slot};

/// The journal as a picture of the control segment has it.
pub(super) struct Journal {
    pub(super) reclaim: Position,
    pub(super) tail: Position,
    pub(super) records: Vec<RecordReport>,
    pub(super) leases: Vec<LeaseReport>,
    /// Why it ends where it does, if not at the first word that is not committed.
    pub(super) broken: Option<TakeoverError>,
}

/// A block that is leased: group, true for the device's, id.
type Leased = BTreeSet<(u32, bool, u32)>;

/// Reads the journal. `ranks` are pictures of the rank segments that could be read, by rank.
pub(super) fn read(control: &Picture, map: &RegionMap, groups: u32, ranks: &[(Rank, Picture)]) -> Journal {
    let shape = RingShape {
        at: map.ring_at(),
        bytes: map.ring_bytes(),
    };
    let members: Vec<_> = (0..map.ranks())
        .map(|rank| (Rank(rank), read_member(control, map, Rank(rank))))
        .collect();
    let mut records: Vec<RecordReport> = Vec::new();
    let mut blocks: Vec<Leased> = Vec::new();
    let read = scan(control, shape, |record, words| {
        // Of a padding record only the first line counts: the rest of its header reads as zero.
        let mut header = RecordHeader::default();
        header
            .as_mut_bytes()
            .iter_mut()
            .zip(words.as_bytes())
            .for_each(|(to, from)| *to = *from);
        let answers = members.iter().map(|(rank, member)| {
            let segment = ranks.iter().find(|(of, _)| of == rank).map(|(_, picture)| picture);
            answer(*rank, member, segment, shape, record.position, &header)
        });
        let plan = Plan::parse_checked_before(words).ok();
        records.push(report(record, &header, plan.as_ref(), answers.collect()));
        blocks.push(plan.as_ref().map(leased).unwrap_or_default());
        Ok(())
    });
    let (reclaim, tail, broken) = match read {
        Ok((reclaim, tail)) => (reclaim, tail, None),
        Err(error) => {
            let end = records.last().map_or(0, |record| record.position + record.bytes);
            let begin = records.first().map_or(end, |record| record.position);
            (Position(begin), Position(end), Some(error))
        }
    };
    let leases = leases(&records, &blocks, groups);
    Journal {
        reclaim,
        tail,
        records,
        leases,
        broken,
    }
}

fn report(record: Journaled, header: &RecordHeader, plan: Option<&Plan<'_>>, ranks: Vec<AnswerReport>) -> RecordReport {
    RecordReport {
        position: record.position.0,
        bytes: record.bytes,
        kind: name(record.kind),
        request: plan.map_or(String::new(), |plan| plan.request().escape_ascii().to_string()),
        request_epoch: header.request_epoch,
        operation: header.operation_id,
        generation: header.pool_generation,
        map_revision: header.map_revision,
        selection_revision: header.selection_revision,
        target: (record.kind == Kind::Abort).then_some(header.target),
        rows: header.row_count,
        pairs: header.pair_count,
        producer_epoch: format!("{:016x}", header.producer_epoch),
        ranks,
    }
}

/// What a rank has said about a record, by the rules of the producer (X12, X24).
fn answer(
    rank: Rank,
    member: &Member,
    segment: Option<&Picture>,
    shape: RingShape,
    position: Position,
    header: &RecordHeader,
) -> AnswerReport {
    let mut report = AnswerReport {
        rank: rank.0,
        state: "open",
        reason: None,
        bytes_moved: 0,
        device_ns: 0,
    };
    if member.epoch.0 == 0 || position < member.first {
        report.state = "rank_lost";
        return report;
    }
    let Some(segment) = segment else {
        report.state = "unknown";
        return report;
    };
    match read_slot(segment, shape, position) {
        SlotState::Open => {}
        SlotState::Stray(_) => report.state = "stray",
        SlotState::Answered(slot) => {
            let belongs = slot.identity == header.checksum
                && slot.producer_epoch == header.producer_epoch
                && slot.worker_epoch == member.epoch.0;
            report.state = match Terminal::from_slot(slot.status) {
                Some(Terminal::Done) if belongs => "done",
                Some(Terminal::Superseded) if belongs => "superseded",
                Some(Terminal::Rejected) if belongs => "rejected",
                Some(Terminal::Failed) if belongs => "failed",
                _ => "conflicting",
            };
            report.reason = (report.state == "rejected").then(|| reason(slot.reason));
            report.bytes_moved = slot.bytes_moved;
            report.device_ns = slot.device_ns;
        }
    }
    report
}

/// True where no rank owes the record an answer any more.
fn ended(record: &RecordReport) -> bool {
    let open = |answer: &AnswerReport| matches!(answer.state, "open" | "unknown" | "stray");
    !record.ranks.iter().any(open)
}

/// Blocks that a plan leases from its publishing to the last answer (X14): what `LeaseTable::take` counts.
fn leased(plan: &Plan<'_>) -> Leased {
    let mut blocks = Leased::new();
    for row in plan.rows() {
        let (source, destination) = match (plan.kind(), plan.mode()) {
            (Kind::Upload, _) => (Some(false), true),
            (Kind::WriteBack, _) => (Some(true), false),
            (Kind::Retain, Some(RetainMode::ByteMove)) => (Some(true), true),
            (Kind::Retain, _) => (None, true), // its sources are slots of the old table
            _ => continue,
        };
        for pair in plan.pairs(row) {
            blocks.extend(source.map(|device| (row.group, device, pair.source)));
            blocks.insert((row.group, destination, pair.destination));
        }
    }
    blocks
}

/// Blocks that are leased, by group: those of the records that some rank still owes, and of those with an Abort under
/// way (X15).
fn leases(records: &[RecordReport], blocks: &[Leased], groups: u32) -> Vec<LeaseReport> {
    let aborted: BTreeSet<u64> = records
        .iter()
        .filter(|record| !ended(record))
        .filter_map(|record| record.target)
        .collect();
    let held = |record: &RecordReport| !ended(record) || aborted.contains(&record.position);
    let mut all = Leased::new();
    for (_, blocks) in records.iter().zip(blocks).filter(|(record, _)| held(record)) {
        all.extend(blocks);
    }
    let count = |group: u32, device: bool| all.range((group, device, 0)..=(group, device, u32::MAX)).count();
    let report = |group| LeaseReport {
        group,
        source_blocks: count(group, false),
        device_blocks: count(group, true),
    };
    (0..groups).map(report).collect()
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Padding => "padding",
        Kind::Upload => "upload",
        Kind::Keep => "keep",
        Kind::Retain => "retain",
        Kind::WriteBack => "write_back",
        Kind::Abort => "abort",
        Kind::Reset => "reset",
    }
}
