//! What the ranks and the network do: they carry out, acknowledge, delay, repeat and make things up.

use kvsluice_cpu_worker::invariants::{check_progress, check_ranks};
use kvsluice_cpu_worker::ledger::{Ack, AckError, Acked, OperationKey};
use kvsluice_layout::ids::{MapRevision, OperationId, Rank, RequestEpoch, SelectionRevision};

use crate::world::*;

impl World {
    /// One rank carries out one operation: its transfers end, its tables are applied, it acknowledges.
    pub(crate) fn execute(&mut self) -> Outcome {
        if self.executions.is_empty() {
            return Ok(());
        }
        let choice = self.rng.usize(0..self.executions.len());
        let Execution {
            request,
            rank,
            key,
            view,
            ..
        } = self.executions.swap_remove(choice);
        let ack = Ack {
            key,
            revision: view.revision,
            rank: Rank(rank),
        };
        let current = &mut self.requests[request];
        let pending = current.epoch == key.request_epoch
            && current
                .operations
                .get(&key.operation.get())
                .is_some_and(|known| known.state == KnownState::Pending);
        if pending {
            current.ranks[rank as usize] = view;
        }
        self.messages.push((request, ack)); // a superseded operation is acknowledged too, too late
        self.settle()
    }

    /// The network delivers one acknowledgement, any one, and may deliver it again.
    pub(crate) fn deliver(&mut self) -> Outcome {
        if self.messages.is_empty() {
            return Ok(());
        }
        let choice = self.rng.usize(0..self.messages.len());
        let again = self.messages.len() < 40 && self.rng.u32(0..4) == 0;
        let (index, ack) = if again {
            self.messages[choice]
        } else {
            self.messages.swap_remove(choice)
        };
        let request = &mut self.requests[index];
        let live = request.residency.is_some() && request.epoch == ack.key.request_epoch;
        let known = request
            .operations
            .get_mut(&ack.key.operation.get())
            .filter(|known| live && known.key == ack.key);
        let before = self.ledger.state(request.name.as_bytes());
        let answer = self.ledger.ack(request.name.as_bytes(), &ack)?;
        let Some(known) = known else {
            return ensure(answer == Acked::Ignored, || {
                format!("{ack:?} of another life gave {answer:?}")
            });
        };
        match (known.state, &answer) {
            (KnownState::Aborted, Acked::Ignored) | (KnownState::Committed, Acked::Duplicate) => Ok(()),
            (KnownState::Pending, Acked::Duplicate) if known.acked.contains(&ack.rank.get()) => Ok(()),
            (KnownState::Pending, Acked::Recorded) if known.acked.insert(ack.rank.get()) => {
                ensure(known.acked.len() < self.ranks as usize, || {
                    format!("all ranks, and {answer:?}")
                })
            }
            (KnownState::Pending, Acked::Committed(operation)) if known.acked.insert(ack.rank.get()) => {
                // R50, R60: every rank, by number.
                ensure(known.acked.len() == self.ranks as usize, || {
                    format!("{:?} of {}", known.acked, self.ranks)
                })?;
                known.state = KnownState::Committed;
                self.commits += 1;
                let Some(residency) = &mut request.residency else {
                    return Ok(());
                };
                residency.commit(operation, &mut self.owners, &mut Vec::new())?;
                request.before = None;
                let after = (residency.map_revision(), residency.revision());
                check_ranks(&request.ranks)?;
                if let Some(before) = before {
                    check_progress((before.map_revision, before.revision), after, true)?;
                }
                let busy = self
                    .executions
                    .iter()
                    .any(|execution| execution.key == ack.key && execution.request == index);
                ensure(!busy, || {
                    format!("{:?} committed while a rank has still to carry it out", ack.key)
                })?;
                self.finished(index)
            }
            _ => Err(format!("{ack:?} of {known:?} gave {answer:?}").into()),
        }
    }

    /// R46: what no rank can have sent, or a broken one did, changes nothing.
    pub(crate) fn made_up_ack(&mut self, index: usize) -> Outcome {
        let request = &self.requests[index];
        let Some(residency) = &request.residency else {
            return Ok(());
        };
        let pending = request
            .operations
            .values()
            .find(|known| known.state == KnownState::Pending);
        let highest = request.operations.keys().next_back().copied();
        let key = OperationKey {
            request_epoch: request.epoch,
            operation: OperationId(highest.map_or(0, |highest| highest + 1)),
            pool_generation: GENERATION,
            map_revision: residency.map_revision(),
        };
        let ack = Ack {
            key,
            revision: residency.revision(),
            rank: Rank(0),
        };
        let before = self.ledger.state(request.name.as_bytes());
        let name = request.name.as_bytes();
        let answer = match (self.rng.u32(0..5), pending) {
            (0, _) => self.ledger.ack(
                name,
                &Ack {
                    rank: Rank(self.ranks),
                    ..ack
                },
            ),
            (1, _) => self.ledger.ack(name, &ack),
            (2, _) => {
                let request_epoch = RequestEpoch(key.request_epoch.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: OperationKey { request_epoch, ..key },
                        ..ack
                    },
                )
            }
            (3, Some(known)) => {
                let revision = SelectionRevision(known.revision.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: known.key,
                        revision,
                        ..ack
                    },
                )
            }
            (_, Some(known)) => {
                let map_revision = MapRevision(known.key.map_revision.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: OperationKey {
                            map_revision,
                            ..known.key
                        },
                        ..ack
                    },
                )
            }
            _ => return Ok(()),
        };
        let refused = matches!(
            answer,
            Err(AckError::UnknownRank { .. } | AckError::Future { .. } | AckError::Conflict { .. })
        );
        ensure(refused, || format!("a made-up acknowledgement gave {answer:?}"))?;
        ensure(before == self.ledger.state(name), || {
            "a refused acknowledgement changed something".to_owned()
        })
    }
}
