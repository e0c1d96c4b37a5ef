//! What a new producer makes of the ranks' reports (X25): the residency that all of them hold alike is adopted, and
//! anything unequal leads to a Reset.
//!
//! Whose a block is, every report says. What lies in a slot it says by the content tag that the plan carried: a request
//! whose every slot is known goes on where it stood; another gives its blocks back and begins again.
#![forbid(unsafe_code)]

use std::collections::HashSet;

use kvsluice_layout::export::{RequestExport, ResidencyExport};
use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock, PhysicalBlock, PoolGeneration, Rank};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::table::LayerTable;

/// Why the reports are not adopted: the pools are reset.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Disagreement {
    /// A rank has no report.
    #[error("{found} ranks report, {ranks} are expected")]
    Ranks {
        /// Reports.
        found: usize,
        /// Ranks of the channel.
        ranks: usize,
    },
    /// Pools of different generations.
    #[error("rank {rank} is at {found:?}, rank 0 at {expected:?}")]
    Generation {
        /// The rank.
        rank: Rank,
        /// Its generation.
        found: PoolGeneration,
        /// That of rank 0.
        expected: PoolGeneration,
    },
    /// A request that not every rank holds alike.
    #[error("rank {rank} holds request {request:?} otherwise than rank 0, or only one of them holds it")]
    Request {
        /// The rank.
        rank: Rank,
        /// The request's id, as text.
        request: String,
    },
}

/// What the reports of all ranks, in the order of the ranks, say alike.
///
/// # Errors
/// [`Disagreement`] with the first difference.
pub fn agree(reports: Vec<ResidencyExport>, ranks: usize) -> Result<ResidencyExport, Disagreement> {
    let found = reports.len();
    let mut reports = reports.into_iter();
    let first = reports.next().filter(|_| found == ranks);
    let first = first.ok_or(Disagreement::Ranks { found, ranks })?;
    for (rank, report) in (1..).map(Rank).zip(reports) {
        if report.pool_generation != first.pool_generation {
            return Err(Disagreement::Generation {
                rank,
                found: report.pool_generation,
                expected: first.pool_generation,
            });
        }
        if let Some(request) = difference(&first.requests, &report.requests)
            && !planted("x25_unequal_is_adopted")
        {
            return Err(Disagreement::Request {
                rank,
                request: String::from_utf8_lossy(&request.request).into_owned(),
            });
        }
    }
    Ok(first)
}

/// The first request that is not in both lists alike. Both are in the order of the ids.
fn difference<'a>(one: &'a [RequestExport], other: &'a [RequestExport]) -> Option<&'a RequestExport> {
    let differs = one.iter().zip(other).find(|(one, other)| one != other);
    let longer = if one.len() > other.len() { one } else { other };
    differs
        .map(|(one, _)| one)
        .or_else(|| longer.get(one.len().min(other.len())))
}

/// A layer with memory of its own: its group, and the tokens of a block.
pub type OwnLayer = (DecoderLayer, GroupId, u32);

/// The tables of a request, by the layers given, where every slot is a whole block whose place in the sequence
/// `logical_of` its tag is known, and the request owns what they name. `None` where it is otherwise.
pub fn tables_of(
    request: &RequestExport,
    layers: &[OwnLayer],
    logical_of: impl Fn(u64) -> Option<LogicalBlock>,
) -> Option<Vec<LayerTable>> {
    let groups = request.groups.iter();
    let owned: Vec<HashSet<u32>> = groups.map(|group| group.owned.iter().copied().collect()).collect();
    let mut tables = Vec::with_capacity(layers.len());
    for &(layer, group, block_tokens) in layers {
        let table = request.table(layer, group)?;
        let blocks = table.blocks.len();
        let whole = u64::from(table.valid_tokens) == blocks as u64 * u64::from(block_tokens);
        let owned = owned.get(group.index())?;
        if table.tags.len() != blocks || !whole || !table.blocks.iter().all(|block| owned.contains(block)) {
            return None;
        }
        let mut logical = table
            .tags
            .iter()
            .map(|tag| logical_of(*tag).map(Some))
            .collect::<Option<Vec<_>>>()?;
        if planted("x25_slots_are_mistaken") {
            logical.reverse();
        }
        let physical = table.blocks.iter().copied().map(PhysicalBlock).collect();
        let valid = BlockCount(u32::try_from(blocks).ok()?);
        tables.push(LayerTable::new(layer, group, logical, physical, valid).ok()?);
    }
    Some(tables)
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::export::{GroupExport, TableExport};
    use kvsluice_layout::ids::{MapRevision, RequestEpoch, SelectionRevision};
    use kvsluice_layout::planted::with_planted;

    use super::*;

    const LAYERS: [OwnLayer; 2] = [(DecoderLayer(0), GroupId(0), 16), (DecoderLayer(1), GroupId(0), 16)];

    fn table(blocks: &[u32], tags: &[u64]) -> TableExport {
        TableExport {
            blocks: blocks.to_vec(),
            tags: tags.to_vec(),
            valid_tokens: blocks.len() as u32 * 16,
        }
    }

    /// Layer 0 has the blocks of tags 107 and 103 in its slots, layer 1 those of 103 and 101.
    fn request() -> RequestExport {
        RequestExport {
            request: b"a-b".to_vec(),
            epoch: RequestEpoch(9),
            map_revision: MapRevision(3),
            selection_revision: SelectionRevision(5),
            digest: 77,
            groups: vec![GroupExport {
                owned: vec![19, 20, 21],
                shared: None,
            }],
            layers: vec![table(&[19, 21], &[107, 103]), table(&[20, 21], &[103, 101])],
        }
    }

    fn report() -> ResidencyExport {
        ResidencyExport {
            pool_generation: PoolGeneration(4),
            digest: 1,
            requests: vec![request()],
        }
    }

    fn logical_of(tag: u64) -> Option<LogicalBlock> {
        (100..110).contains(&tag).then(|| LogicalBlock(tag as u32 - 100))
    }

    fn changed(change: impl Fn(&mut RequestExport)) -> RequestExport {
        let mut request = request();
        change(&mut request);
        request
    }

    fn deviations() -> Vec<RequestExport> {
        vec![
            changed(|request| request.request.push(b'0')),
            changed(|request| request.epoch = RequestEpoch(8)),
            changed(|request| request.map_revision = MapRevision(2)),
            changed(|request| request.selection_revision = SelectionRevision(6)),
            changed(|request| request.digest = 78),
            changed(|request| request.groups[0].owned.push(22)),
            changed(|request| request.layers[1].blocks.swap(0, 1)),
            changed(|request| request.layers[1].tags[0] = 102),
            changed(|request| request.layers[0].valid_tokens -= 1),
            changed(|request| request.groups[0].shared = Some(table(&[19], &[107]))),
        ]
    }

    #[test]
    fn x25_what_all_ranks_report_alike_is_adopted_and_anything_unequal_is_not() {
        assert_eq!(agree(vec![report(), report(), report()], 3), Ok(report()));
        assert_eq!(
            agree(vec![report()], 2),
            Err(Disagreement::Ranks { found: 1, ranks: 2 })
        );
        let mut other = report();
        other.pool_generation = PoolGeneration(5);
        let refused = agree(vec![report(), report(), other], 3);
        assert_eq!(
            refused,
            Err(Disagreement::Generation {
                rank: Rank(2),
                found: PoolGeneration(5),
                expected: PoolGeneration(4)
            })
        );
        let refusals = || {
            let mut unequal: Vec<Vec<RequestExport>> = deviations().into_iter().map(|one| vec![one]).collect();
            unequal.push(Vec::new());
            unequal.push(vec![request(), changed(|request| request.request.push(b'1'))]);
            let refused = |requests: Vec<RequestExport>| {
                [(1, 2), (2, 3)].into_iter().all(|(at, ranks)| {
                    let mut reports = vec![report(); ranks];
                    reports[at].requests.clone_from(&requests);
                    let found = agree(reports, ranks);
                    matches!(found, Err(Disagreement::Request { rank, .. }) if rank == Rank(at as u32))
                })
            };
            unequal.into_iter().filter(|requests| refused(requests.clone())).count()
        };
        assert_eq!(refusals(), deviations().len() + 2);
        assert_eq!(with_planted("x25_unequal_is_adopted", refusals), 0, "the planted fault");
    }

    #[test]
    fn x25_a_request_whose_every_slot_is_known_is_resumed_slot_by_slot() {
        let slots = |tables: Vec<LayerTable>| {
            let slots = |table: &LayerTable| {
                let logical = table.logical_by_slot().iter().map(|block| block.unwrap().0);
                logical
                    .zip(table.named().iter().map(|block| block.0))
                    .collect::<Vec<_>>()
            };
            tables.iter().map(slots).collect::<Vec<_>>()
        };
        let found = || tables_of(&request(), &LAYERS, logical_of).map(slots);
        let expected = vec![vec![(7, 19), (3, 21)], vec![(3, 20), (1, 21)]];
        assert_eq!(found(), Some(expected.clone()));
        let with_more = changed(|request| request.groups[0].owned.push(22));
        let more = tables_of(&with_more, &LAYERS, logical_of).map(slots);
        assert_eq!(more.as_ref(), Some(&expected), "a block that no table names yet");
        assert_ne!(
            with_planted("x25_slots_are_mistaken", found),
            Some(expected),
            "the planted fault"
        );
    }

    #[test]
    fn x25_a_request_with_a_slot_that_is_not_known_is_not_resumed() {
        let not_whole: Vec<RequestExport> = vec![
            changed(|request| request.layers[0].tags.clear()),
            changed(|request| request.layers[0].tags[1] = 99),
            changed(|request| request.layers[0].tags[1] = 107),
            changed(|request| request.layers[0].valid_tokens -= 1),
            changed(|request| request.layers[0].blocks[1] = 19),
            changed(|request| request.groups[0].owned.truncate(2)),
            changed(|request| request.groups.clear()),
            changed(|request| request.layers.truncate(1)),
        ];
        for request in not_whole {
            assert_eq!(tables_of(&request, &LAYERS, logical_of), None, "{request:?}");
        }
    }
}
