//! The ledger's rules. The order of its refusals is in the crate's vectors.

use kvsluice_layout::planted::with_planted;

use super::*;

const EPOCH: RequestEpoch = RequestEpoch(2);
const GENERATION: PoolGeneration = PoolGeneration(5);

fn ledger(ranks: u32) -> Ledger {
    let mut ledger = Ledger::new(NonZeroU32::new(ranks).unwrap());
    ledger.open(b"a-b-c", EPOCH).unwrap();
    ledger
}

fn submit(ledger: &mut Ledger, operation: u64, revision: u64, bytes: u64) -> Result<Submitted, SubmitError> {
    ledger.submit(
        b"a-b-c",
        &Submission {
            request_epoch: EPOCH,
            operation: OperationId(operation),
            pool_generation: GENERATION,
            revision: SelectionRevision(revision),
            bytes,
        },
    )
}

fn pending(ledger: &mut Ledger, operation: u64, revision: u64, bytes: u64) -> Operation<Pending> {
    match submit(ledger, operation, revision, bytes) {
        Ok(Submitted::Pending(operation)) => operation,
        other => panic!("{other:?}"),
    }
}

fn ack_of(operation: &Operation<Pending>, rank: u32) -> Ack {
    Ack {
        key: operation.key(),
        revision: operation.revision(),
        rank: Rank(rank),
    }
}

/// (g, r, pending)
fn state(ledger: &Ledger) -> (u64, u64, Option<u64>) {
    let state = ledger.state(b"a-b-c").unwrap();
    (
        state.map_revision.get(),
        state.revision.get(),
        state.pending.map(OperationId::get),
    )
}

/// How many acknowledgements it took to commit, each rank saying it twice.
fn acks_to_commit(ranks: u32, bytes: u64) -> u32 {
    let mut ledger = ledger(ranks);
    let operation = match submit(&mut ledger, 1, 1, bytes) {
        Ok(Submitted::Pending(operation)) => operation,
        _ => return 0,
    };
    for count in 0..2 * ranks {
        if state(&ledger).2.is_none() {
            return count;
        }
        ledger.ack(b"a-b-c", &ack_of(&operation, count / 2)).unwrap();
    }
    2 * ranks
}

#[test]
fn f14_r50_r60_every_rank_commits_and_one_rank_twice_is_one_rank() {
    for ranks in [1, 2, 8, 64, 65] {
        assert_eq!(acks_to_commit(ranks, 64), 2 * ranks - 1);
    }
    for fault in ["r60_counts_acks", "r50_r60_first_rank_commits"] {
        assert_ne!(
            with_planted(fault, || acks_to_commit(3, 64)),
            5,
            "the planted fault {fault} is not seen"
        );
    }
}

#[test]
fn r42_r44_a_zero_delta_takes_every_rank_and_moves_r_alone() {
    let finalised = || {
        let mut ledger = ledger(2);
        let upload = pending(&mut ledger, 1, 1, 64);
        for rank in [0, 1] {
            ledger.ack(b"a-b-c", &ack_of(&upload, rank)).unwrap();
        }
        if let Ok(Submitted::Pending(zero)) = submit(&mut ledger, 2, 4, 0) {
            let early = state(&ledger);
            for rank in [0, 1] {
                let _ = ledger.ack(b"a-b-c", &ack_of(&zero, rank));
            }
            return (early, state(&ledger));
        }
        (state(&ledger), state(&ledger))
    };
    assert_eq!(finalised(), ((1, 1, Some(2)), (1, 4, None)));
    for fault in [
        "r42_zero_delta_not_finalised",
        "r42_zero_delta_skips_ranks",
        "r44_zero_delta_moves_g",
    ] {
        assert_ne!(
            with_planted(fault, finalised),
            finalised(),
            "the planted fault {fault} is not seen"
        );
    }
}

#[test]
fn r45_every_part_of_the_key_names_the_operation() {
    let mut ledger = ledger(1);
    let operation = pending(&mut ledger, 1, 1, 64);
    let good = ack_of(&operation, 0);
    let key = good.key;
    assert_eq!(format!("{operation:?}"), format!("{key:?} {:?}", SelectionRevision(1)));
    let others = [
        Ack {
            key: OperationKey {
                pool_generation: PoolGeneration(6),
                ..key
            },
            ..good
        },
        Ack {
            key: OperationKey {
                pool_generation: PoolGeneration(4),
                ..key
            },
            ..good
        },
        Ack {
            key: OperationKey {
                map_revision: MapRevision(0),
                ..key
            },
            ..good
        },
        Ack {
            revision: SelectionRevision(2),
            ..good
        },
    ];
    for other in others {
        assert!(
            matches!(ledger.ack(b"a-b-c", &other), Err(AckError::Conflict { .. })),
            "{other:?}"
        );
    }
    assert_eq!(state(&ledger), (0, 0, Some(1)));
    assert!(matches!(ledger.ack(b"a-b-c", &good), Ok(Acked::Committed(_))));
    for other in others {
        assert_eq!(ledger.ack(b"a-b-c", &other), Ok(Acked::Ignored));
    }
    let mut other = super::tests::ledger(1);
    pending(&mut other, 1, 1, 64);
    let taken = with_planted("r45_knows_operations_by_number", || other.ack(b"a-b-c", &others[0]));
    assert!(taken.is_ok(), "the planted fault is not seen");
}

#[test]
fn f10_r46_repeated_and_old_acknowledgements_change_nothing_and_are_counted() {
    let after = || {
        let mut ledger = ledger(1);
        let old = pending(&mut ledger, 1, 1, 64);
        ledger.ack(b"a-b-c", &ack_of(&old, 0)).unwrap();
        let new = pending(&mut ledger, 2, 2, 64);
        ledger.ack(b"a-b-c", &ack_of(&new, 0)).unwrap();
        let stale = OperationKey {
            request_epoch: RequestEpoch(1),
            ..new.key()
        };
        let answers = [
            ledger.ack(b"a-b-c", &ack_of(&old, 0)),
            ledger.ack(
                b"a-b-c",
                &Ack {
                    key: stale,
                    ..ack_of(&new, 0)
                },
            ),
            ledger.ack(b"nobody", &ack_of(&new, 0)),
            ledger.ack(b"a-b-c", &ack_of(&new, 7)),
        ];
        (answers.map(|answer| answer.ok()), state(&ledger), ledger.counters())
    };
    let answers = [Some(Acked::Duplicate), Some(Acked::Ignored), Some(Acked::Ignored), None];
    assert_eq!(
        after(),
        (
            answers,
            (2, 2, None),
            AckCounters {
                duplicate: 1,
                ignored: 2,
                refused: 1
            }
        )
    );
    let fault = "r46_stale_ack_moves_back";
    assert_ne!(
        with_planted(fault, after),
        after(),
        "the planted fault {fault} is not seen"
    );
}

#[test]
fn f13_r46_an_acknowledgement_of_an_earlier_life_is_ignored() {
    let answer = || {
        let mut ledger = ledger(1);
        let operation = pending(&mut ledger, 1, 1, 64);
        let aborted = ledger.open(b"a-b-c", RequestEpoch(3)).unwrap();
        assert_eq!(aborted.map(|aborted| aborted.key()), Some(operation.key()));
        ledger.ack(b"a-b-c", &ack_of(&operation, 0))
    };
    assert_eq!(answer(), Ok(Acked::Ignored));
    assert_ne!(
        with_planted("r46_epoch_ignored", answer),
        answer(),
        "the planted fault is not seen"
    );
}

#[test]
fn r47_a_retry_starts_no_second_upload() {
    let uploads = || {
        let mut ledger = ledger(1);
        let mut uploads = 0;
        let mut retry = |ledger: &mut Ledger| {
            uploads += u32::from(matches!(submit(ledger, 1, 1, 64), Ok(Submitted::Pending(_))));
        };
        retry(&mut ledger);
        retry(&mut ledger); // while it is pending
        let key = OperationKey {
            request_epoch: EPOCH,
            operation: OperationId(1),
            pool_generation: GENERATION,
            map_revision: MapRevision(1),
        };
        ledger
            .ack(
                b"a-b-c",
                &Ack {
                    key,
                    revision: SelectionRevision(1),
                    rank: Rank(0),
                },
            )
            .unwrap();
        retry(&mut ledger); // after its commit
        uploads
    };
    assert_eq!(uploads(), 1);
    assert_ne!(
        with_planted("r47_retry_uploads_again", uploads),
        1,
        "the planted fault is not seen"
    );
}

#[test]
fn r49_a_request_is_its_whole_id() {
    let apart = || {
        let mut ledger = ledger(1); // "a-b-c" is open
        let names: [&[u8]; 5] = [b"a-b-d", b"a-b", b"abc", b"-", b"\xff\x00-\xff"];
        names
            .iter()
            .all(|name| ledger.state(name).is_none() && ledger.open(name, RequestEpoch(1)).is_ok())
    };
    assert!(apart());
    assert!(!with_planted("r49_splits_ids", apart), "the planted fault is not seen");
}

#[test]
fn r59_an_abort_leaves_the_committed_state_and_uses_the_id_up() {
    let mut ledger = ledger(2);
    let operation = pending(&mut ledger, 1, 1, 64);
    ledger.ack(b"a-b-c", &ack_of(&operation, 0)).unwrap();
    assert!(ledger.abort(b"a-b-c", RequestEpoch(1), OperationId(1)).is_none());
    let aborted = ledger.abort(b"a-b-c", EPOCH, OperationId(1)).unwrap();
    assert_eq!((aborted.key(), state(&ledger)), (operation.key(), (0, 0, None)));
    assert_eq!(ledger.ack(b"a-b-c", &ack_of(&operation, 1)), Ok(Acked::Ignored));
    assert_eq!(
        submit(&mut ledger, 1, 1, 64),
        Err(SubmitError::Aborted {
            operation: OperationId(1)
        })
    );
    let again = pending(&mut ledger, 2, 1, 64);
    assert_eq!(
        ledger.ack(b"a-b-c", &ack_of(&again, 0)),
        Ok(Acked::Recorded),
        "no rank of the aborted one counts"
    );
}

#[test]
fn f11_a_finish_after_the_submission_waits_for_its_outcome() {
    let mut ledger = ledger(1);
    let operation = pending(&mut ledger, 1, 1, 64);
    assert_eq!(ledger.finish(b"a-b-c", EPOCH), Finished::Draining);
    assert_eq!(submit(&mut ledger, 2, 2, 64), Err(SubmitError::Finishing));
    assert!(matches!(
        ledger.ack(b"a-b-c", &ack_of(&operation, 0)),
        Ok(Acked::Committed(_))
    ));
    assert_eq!(ledger.state(b"a-b-c"), None);
    assert!(ledger.open(b"a-b-c", EPOCH).is_err() && ledger.open(b"a-b-c", RequestEpoch(3)).is_ok());
}

#[test]
fn r45_r46_what_names_another_life_is_stale_or_of_the_future_and_changes_nothing() {
    let mut ledger = ledger(1);
    let operation = pending(&mut ledger, 1, 1, 64);
    let epoch = |epoch| Submission {
        request_epoch: RequestEpoch(epoch),
        operation: OperationId(2),
        pool_generation: GENERATION,
        revision: SelectionRevision(2),
        bytes: 64,
    };
    let current = EPOCH;
    assert_eq!(
        [1, 3].map(|found| ledger.submit(b"a-b-c", &epoch(found)).unwrap_err()),
        [
            SubmitError::StaleEpoch {
                found: RequestEpoch(1),
                current
            },
            SubmitError::FutureEpoch {
                found: RequestEpoch(3),
                current
            }
        ]
    );
    let mut ack = |epoch| {
        let mut ack = ack_of(&operation, 0);
        ack.key.request_epoch = RequestEpoch(epoch);
        ledger.ack(b"a-b-c", &ack)
    };
    assert_eq!(ack(1), Ok(Acked::Ignored));
    assert!(matches!(ack(3), Err(AckError::Future { .. })));
    for epoch in [1, 3].map(RequestEpoch) {
        assert_eq!(ledger.finish(b"a-b-c", epoch), Finished::Ignored);
        assert_eq!(ledger.abort(b"a-b-c", epoch, operation.key().operation), None);
    }
    assert_eq!(state(&ledger), (0, 0, Some(1)));
    let said = ledger.counters();
    assert_eq!((said.duplicate, said.ignored, said.refused), (0, 1, 1));
}
