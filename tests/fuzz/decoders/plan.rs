//! A record that lies in private memory: `Plan::parse` and `LeaseTable::check`, as it is and sealed by somebody who means
//! it. What is accepted comes back from its own encoding.

use std::cell::RefCell;

use kvsluice_layout::ids::{Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Plan, PlanDraft, seal};
use kvsluice_layout::record::{Kind, RetainMode};

use super::channel::Channel;
use super::input::words;
use super::soundness::assert_sound;

/// Where a record is encoded again: what a forged one says of its own position is any word.
const AT: Position = Position(64);

thread_local! {
    static TABLE: RefCell<(Channel, LeaseTable)> = RefCell::new({
        let channel = Channel::new();
        let leases = LeaseTable::new(&channel.map);
        (channel, leases)
    });
}

pub fn plan(data: &[u8]) {
    let mut record = words(data);
    let _ = Plan::parse(&record);
    // With the right length and checksum, which no fuzzer guesses.
    if record.len() >= 16 {
        record[2] = record[2] & !0xFFFF_FFFF | (record.len() * 8) as u64;
    }
    seal(&mut record);
    let Ok(plan) = Plan::parse(&record) else { return };
    TABLE.with_borrow_mut(|(channel, leases)| {
        let rows = plan.lease_rows();
        if leases.check(&rows).is_ok() {
            assert_sound(&channel.map, &plan);
            leases.take(&rows);
            leases.release(&rows);
            assert_comes_back(&plan);
        }
        assert_eq!(leases.leased_blocks(), 0);
    });
}

fn assert_comes_back(plan: &Plan<'_>) {
    let (request, operation, target) = (plan.request(), plan.operation(), plan.header().target);
    let mut draft = PlanDraft::new();
    match (plan.kind(), plan.mode()) {
        (Kind::Upload, _) => draft.upload(request, operation),
        (Kind::Keep, _) => draft.keep(request, operation),
        (Kind::Retain, mode) => draft.retain(request, operation, mode.unwrap_or(RetainMode::SharedTable)),
        (Kind::WriteBack, _) => draft.write_back(request, operation, target),
        _ => return,
    };
    let rows = plan.rows().iter();
    // Rows may share their pairs, whose tags would then come twice.
    let tags: Vec<u64> = rows.clone().flat_map(|row| plan.tags(row)).copied().collect();
    for row in rows {
        draft.raw_row(
            row.layer,
            row.group,
            row.source_kind,
            row.valid_tokens,
            plan.pairs(row).iter().copied(),
        );
    }
    draft.tags(tags.iter().copied());
    let Some(bytes) = draft.encoded_bytes() else { return };
    let mut again = vec![0; bytes / 8];
    draft.encode(ProcessEpoch(1), AT, &mut again).expect("it was decoded");
    let again = Plan::parse(&again).expect("what was encoded");
    assert_eq!(
        (again.request(), again.operation(), again.kind()),
        (request, operation, plan.kind())
    );
    assert_eq!((again.mode(), again.position()), (plan.mode(), AT));
    assert_eq!(again.rows().len(), plan.rows().len());
    for (one, two) in again.rows().iter().zip(plan.rows()) {
        assert_eq!((one.layer, one.group, one.valid), (two.layer, two.group, two.valid));
        assert_eq!((one.source_kind, one.valid_tokens), (two.source_kind, two.valid_tokens));
        assert_eq!(again.pairs(one), plan.pairs(two));
        assert_eq!(again.tags(one), plan.tags(two));
    }
}
