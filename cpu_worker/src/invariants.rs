//! What holds between any two steps (I1–I9), as checks that a test or a debugging engine runs on the real state.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use kvsluice_layout::ids::{GroupId, MapRevision, PhysicalBlock, SelectionRevision};
use thiserror::Error;

use crate::ledger::RequestState;
use crate::owner::{Owners, Reference, References};
use crate::residency::Residency;
use crate::table::LayerTable;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{invariant} is broken: {detail}")]
pub struct Broken {
    /// Its name, I1 to I9.
    pub invariant: &'static str,
    /// What was found.
    pub detail: String,
}

fn broken(invariant: &'static str, detail: String) -> Result<(), Broken> {
    Err(Broken { invariant, detail })
}

/// I1, I2, I3 of one request: its tables are well formed, name only owned blocks of their groups, and what is staged
/// follows the committed state.
pub fn check_residency(residency: &Residency, owners: &Owners) -> Result<(), Broken> {
    for table in residency
        .tables()
        .iter()
        .chain(residency.staged_tables().unwrap_or_default())
    {
        if let Err(error) = table.check() {
            return broken("I1", error.to_string());
        }
    }
    for table in residency.tables() {
        let owner = owners.all().iter().find(|owner| owner.group() == table.group());
        let unowned = table
            .named()
            .iter()
            .find(|block| owner.is_none_or(|owner| owner.references(**block).layers == 0));
        if let Some(block) = unowned {
            return broken(
                "I2",
                format!("{:?} names {block:?}, which {:?} has not", table.layer(), table.group()),
            );
        }
    }
    // One staged operation at most: the residency has room for no second.
    if let Some(key) = residency.pending_upload().or(residency.pending_retain()) {
        let step = key.map_revision.get().checked_sub(residency.map_revision().get());
        let same = (key.request_epoch, key.pool_generation) == (residency.request_epoch(), residency.pool_generation());
        if !same || step.is_none_or(|step| step > 1) {
            return broken("I3", format!("{key:?} does not follow {:?}", residency.map_revision()));
        }
    }
    Ok(())
}

/// I4: revisions move at a commit only, and never back. `before` and `after` are (g, r) around one step.
pub fn check_progress(
    before: (MapRevision, SelectionRevision),
    after: (MapRevision, SelectionRevision),
    committed: bool,
) -> Result<(), Broken> {
    let forward = after.0 >= before.0 && after.0.get() - before.0.get() <= 1 && after.1 > before.1;
    match (committed, before == after) {
        (true, _) if forward => Ok(()),
        (false, true) => Ok(()),
        _ => broken("I4", format!("{before:?} became {after:?}, commit: {committed}")),
    }
}

/// I4 between the ledger and the tables: both are at the same revisions, and agree on what is pending.
pub fn check_ledger(state: &RequestState, residency: &Residency) -> Result<(), Broken> {
    let ledger = (state.epoch, state.map_revision, state.revision);
    let tables = (
        residency.request_epoch(),
        residency.map_revision(),
        residency.revision(),
    );
    if ledger != tables {
        return broken("I4", format!("the ledger is at {ledger:?}, the tables at {tables:?}"));
    }
    let staged = residency
        .pending_upload()
        .or(residency.pending_retain())
        .map(|key| key.operation);
    if staged != state.pending {
        return broken(
            "I3",
            format!("the ledger has {:?} pending, the tables {staged:?}", state.pending),
        );
    }
    Ok(())
}

/// I5: every block is free, or owned with exactly the references of `holders`.
pub fn check_references(
    owners: &Owners,
    holders: impl IntoIterator<Item = (GroupId, PhysicalBlock, Reference)>,
) -> Result<(), Broken> {
    let mut expected: HashMap<(GroupId, PhysicalBlock), References> = HashMap::new();
    for (group, block, kind) in holders {
        let references = expected.entry((group, block)).or_default();
        match kind {
            Reference::Layer => references.layers += 1,
            Reference::Regular => references.regular += 1,
            Reference::Prefix => references.prefix += 1,
            Reference::Transfer => references.transfers += 1,
        }
    }
    for owner in owners.all() {
        let mut free = vec![false; owner.all_references().len()];
        for block in owner.free() {
            match free.get_mut(block.index()) {
                Some(seen) if !*seen => *seen = true,
                _ => return broken("I5", format!("{block:?} of {:?} is free twice", owner.group())),
            }
        }
        for ((number, found), free) in (0..).zip(owner.all_references()).zip(free) {
            let block = PhysicalBlock(number);
            let expected = expected.remove(&(owner.group(), block));
            if free != expected.is_none() || *found != expected.unwrap_or_default() {
                let group = owner.group();
                return broken(
                    "I5",
                    format!("{block:?} of {group:?}: {found:?}, free: {free}, held as {expected:?}"),
                );
            }
        }
    }
    match expected.keys().next() {
        Some(unknown) => broken("I5", format!("{unknown:?} is held and does not exist")),
        None => Ok(()),
    }
}

/// I6: a block that a transfer still reads or writes is not free, and no two operations write it.
pub fn check_in_flight(
    owners: &Owners,
    destinations: impl IntoIterator<Item = (u64, GroupId, PhysicalBlock)>,
) -> Result<(), Broken> {
    let mut writers = HashMap::new();
    for (operation, group, block) in destinations {
        let owner = owners.all().iter().find(|owner| owner.group() == group);
        if owner.is_none_or(|owner| owner.references(block).transfers == 0) {
            return broken(
                "I6",
                format!("{block:?} of {group:?} is in flight and no transfer is known to the owner"),
            );
        }
        if *writers.entry((group, block)).or_insert(operation) != operation {
            return broken("I6", format!("two operations write {block:?} of {group:?}"));
        }
    }
    Ok(())
}

/// I7: after an abort, the request is as it was before the plan.
pub fn check_restored(before: &Residency, after: &Residency) -> Result<(), Broken> {
    if before == after {
        Ok(())
    } else {
        broken("I7", format!("before {before:?}\nafter {after:?}"))
    }
}

/// What one rank holds of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankView {
    /// Residency revision.
    pub map_revision: MapRevision,
    /// Selection revision.
    pub revision: SelectionRevision,
    /// Its tables.
    pub tables: Vec<LayerTable>,
}

/// I8: the CPU's ledger is not ahead of a rank, and is where the ranks are once its acknowledgement is published.
pub fn check_order(state: &RequestState, rank: &RankView, published: bool) -> Result<(), Broken> {
    let (ledger, rank) = ((state.map_revision, state.revision), (rank.map_revision, rank.revision));
    if ledger.1 > rank.1 || (published && ledger != rank) {
        return broken("I8", format!("the ledger is at {ledger:?}, a rank at {rank:?}"));
    }
    Ok(())
}

/// I9: all ranks hold the same revisions and tables.
pub fn check_ranks(ranks: &[RankView]) -> Result<(), Broken> {
    match ranks.array_windows().position(|[a, b]| a != b) {
        Some(rank) => broken("I9", format!("rank {rank} and rank {} differ", rank + 1)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
