//! One worker on the stepped host device, with the production producer on the same heap.

use kvsluice_layout::content;
use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, MapRevision, OperationId, PoolGeneration, ProcessEpoch, Rank,
    RequestEpoch, SelectionRevision, SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::{NEW_SLOT, Pair, RetainMode, SourceKind, Terminal};
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap};
use kvsluice_transport::port::Port;
use kvsluice_transport::producer::{Completion, Producer};
use kvsluice_transport::shared::Heap;

use super::{Step, Verifier, Verify, Worker, WorkerError, WorkerSpec};
use crate::copy::HostPool;
use crate::device::adversary::{Adversary, Fault};
use crate::device::host::{HostDevice, KernelMemory, KernelState, Stepper};
use crate::device::{Access, Device, DeviceLost, DeviceSpec, HostSpan, TABLE_POISON};
use crate::tables::{ROW_HEADER_WORDS, TableLimits, TableStore};

const SLOTS: usize = 8;

struct Rig {
    // Dropped first: the device copies from `pool` until it is gone.
    worker: Worker<Heap, Heap, HostDevice>,
    stepper: Stepper,
    producer: Producer<Heap, Heap>,
    map: GeometryMap,
    pool: Box<[u8]>,
    now_ns: u64,
}

fn request(id: u64) -> Operation {
    Operation {
        request_epoch: RequestEpoch(1),
        operation_id: OperationId(id),
        pool_generation: PoolGeneration(1),
        map_revision: MapRevision(id),
        selection_revision: SelectionRevision(id),
    }
}

impl Rig {
    fn new(name: &str, adversary: Adversary) -> Self {
        Self::with(name, adversary, None)
    }

    /// `stalls`: most commands of a queue, and the watchdog's patience in nanoseconds.
    fn with(name: &str, adversary: Adversary, stalls: Option<(u32, u64)>) -> Self {
        let sizing = Sizing {
            source_blocks: Some(64),
            device_blocks: Some(64),
            ranks: Some(1),
            ..Sizing::default()
        };
        let geometry = sizing.apply(preset(name).expect("preset")).expect("sizing");
        let map = GeometryMap::new(&geometry).expect("geometry");
        let slot_bytes = map.writeback_slot_bytes();
        let regions = RegionMap::new(&geometry, MIN_RING_BYTES, SLOTS, slot_bytes as usize).expect("regions");
        let control = Heap::new(regions.control_bytes());
        let segment = Heap::new(regions.rank_bytes());
        let epochs = (ProcessEpoch(11), ProcessEpoch(22));
        let mut producer = Producer::new(control.clone(), regions, LeaseTable::new(&map), epochs.0);
        let first = producer.join(Rank(0), segment.clone(), epochs.1, 7);
        let shape = producer.shape();
        let port = Port::new(
            control,
            segment,
            shape,
            LeaseTable::new(&map),
            epochs.1,
            epochs.0,
            first,
        );
        let limits = TableLimits {
            requests_max: 4,
            blocks_max: 64,
        };
        let mut spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(&map, limits).spec());
        let (commands_max, watchdog_ns) = stalls.unwrap_or((spec.commands_max, 0));
        spec.commands_max = commands_max;
        let mut device = HostDevice::stepped(spec, adversary).expect("device");
        let stepper = device.stepper();
        let mut pool = vec![0_u8; map.pool_bytes() as usize].into_boxed_slice();
        let ends = [map.pool_bytes()];
        // SAFETY: `pool` is dropped after the worker and its device, and is written only between steps.
        let span = unsafe { HostSpan::new(pool.as_mut_ptr(), ends[0], Access::ReadOnly) };
        let region = device.register_all(span, &ends).expect("registered");
        let verifier = Verifier::new(Verify::Full, &mut device, 4096).expect("verifier");
        let spec = WorkerSpec {
            rank: Rank(0),
            pool: HostPool::new(region, &ends),
            write_back: None,
            write_back_slots: (0, slot_bytes),
            tables: limits,
            verifier,
            watchdog_ns,
        };
        let worker = Worker::new(port, map.clone(), device, spec);
        let mut pair = Self {
            worker,
            stepper,
            producer,
            map,
            pool,
            now_ns: 0,
        };
        let mut draft = PlanDraft::new();
        draft.reset(PoolGeneration(1));
        assert_eq!(pair.run(&draft).terminal, Terminal::Done);
        pair
    }

    /// Fills every plane of a source block with the content of `tag`.
    fn fill(&mut self, group: GroupId, block: u32, tag: u64) {
        let layers = self.map.geometry().layers.clone();
        for (layer, index) in layers.iter().zip(0..) {
            if layer.group != group {
                continue;
            }
            let layer_map = self.map.layer(DecoderLayer(index)).expect("layer");
            for (plane, at) in self.map.planes(Rank(0), DecoderLayer(index)).iter().zip(0..) {
                let from = plane.host_at(SourceBlock(block)) as usize;
                let seed = content::seed(tag, layer_map.tensor, 0, at);
                content::fill(seed, &mut self.pool[from..from + plane.bytes as usize]);
            }
        }
    }

    fn settle(&mut self) -> Option<Completion> {
        for _ in 0..10_000 {
            self.now_ns += 1000;
            let step = self.worker.step(self.now_ns).expect("worker");
            self.producer.poll_thorough();
            if let Some(completion) = self.producer.next_completion() {
                return Some(completion);
            }
            if step != Step::Worked {
                self.stepper.step();
            }
        }
        None
    }

    fn run(&mut self, draft: &PlanDraft) -> Completion {
        self.producer.publish(draft).expect("published");
        self.settle().expect("completion")
    }

    fn upload(&self, id: u64, blocks: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.upload(b"a-request", request(id));
        for (layer, index) in self.map.geometry().layers.iter().zip(0..) {
            if layer.alias_of.is_none() {
                let pairs = blocks.iter().map(|&(s, d)| (SourceBlock(s), DestinationBlock(d)));
                draft.row(DecoderLayer(index), layer.group, SourceKind::SourceOnly, pairs);
                draft.tags(blocks.iter().map(|&(s, _)| tag(s)));
            }
        }
        draft
    }
}

fn tag(source: u32) -> u64 {
    1000 + u64::from(source)
}

fn retain(pair: &Rig, id: u64, mode: RetainMode, table: &[(u32, u32)], tags: &[u64]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    draft.retain(b"a-request", request(id), mode);
    let pairs = || table.iter().map(|&(source, destination)| Pair { source, destination });
    for (layer, index) in pair.map.geometry().layers.iter().zip(0..) {
        let layer_id = (mode != RetainMode::SharedTable).then_some(DecoderLayer(index));
        let first_of_group =
            pair.map.geometry().layers.iter().position(|l| l.group == layer.group) == Some(index as usize);
        if layer.alias_of.is_none() && (mode != RetainMode::SharedTable || first_of_group) {
            draft.table_row(layer_id, layer.group, 0, pairs());
            draft.tags(tags.iter().copied());
        }
    }
    draft
}

fn filled(name: &str, adversary: Adversary) -> Rig {
    let mut pair = Rig::new(name, adversary);
    for group in 0..pair.map.geometry().groups.len() as u32 {
        for block in 1..20 {
            pair.fill(GroupId(group), block, tag(block));
        }
    }
    pair
}

#[test]
fn x13_an_upload_is_done_when_its_bytes_are_there_on_every_preset_shape() {
    for name in ["sample", "sample-hybrid"] {
        let mut pair = filled(name, Adversary::late(3));
        let draft = pair.upload(1, &[(3, 5), (4, 6), (5, 9)]);
        assert_eq!(pair.run(&draft).terminal, Terminal::Done, "{name}");
        let counts = pair.worker.counts();
        assert_eq!(
            (counts.mismatched_bytes, counts.verified_bytes),
            (0, counts.bytes_h2d),
            "{name}"
        );
        assert!(counts.bytes_h2d > 0, "{name}");
    }
}

#[test]
fn r57_tables_change_with_a_retain_and_are_verified_as_attention_reads_them() {
    for mode in [RetainMode::SharedTable, RetainMode::LayerTables, RetainMode::ByteMove] {
        let mut pair = filled("sample", Adversary::late(4));
        let upload = pair.upload(1, &[(3, 5), (4, 6), (5, 9)]);
        assert_eq!(pair.run(&upload).terminal, Terminal::Done);
        assert_eq!(
            pair.worker.tables().table(b"a-request", DecoderLayer(0)),
            Some((&[][..], 0)),
            "not before a Retain"
        );
        let first = retain(
            &pair,
            2,
            RetainMode::SharedTable,
            &[(NEW_SLOT, 5), (NEW_SLOT, 6), (NEW_SLOT, 9)],
            &[tag(3), tag(4), tag(5)],
        );
        assert_eq!(pair.run(&first).terminal, Terminal::Done);
        // Keep slots 0 and 2: by remap the table is [5, 9]; by byte move block 9 moves to 6.
        let (table, expected): (&[(u32, u32)], &[u32]) = match mode {
            RetainMode::ByteMove => (&[(5, 5), (9, 6)], &[5, 6]),
            _ => (&[(0, 5), (2, 9)], &[5, 9]),
        };
        let second = retain(&pair, 3, mode, table, &[tag(3), tag(5)]);
        let before = pair.worker.counts().verified_bytes;
        assert_eq!(pair.run(&second).terminal, Terminal::Done, "{mode:?}");
        let counts = pair.worker.counts();
        assert_eq!(
            pair.worker.tables().table(b"a-request", DecoderLayer(1)),
            Some((expected, 0)),
            "{mode:?}"
        );
        assert!(
            counts.verified_bytes > before && counts.mismatched_bytes == 0,
            "{mode:?}"
        );
        assert_eq!(
            counts.bytes_d2d > 0,
            mode == RetainMode::ByteMove,
            "R1: byte movement is its own counter"
        );
    }
}

#[test]
fn r53_a_remap_of_a_slot_that_holds_another_block_is_rejected_and_changes_nothing() {
    let mut pair = filled("sample", Adversary::late(5));
    let upload = pair.upload(1, &[(3, 5), (4, 6)]);
    assert_eq!(pair.run(&upload).terminal, Terminal::Done);
    let table = retain(
        &pair,
        2,
        RetainMode::SharedTable,
        &[(NEW_SLOT, 5), (NEW_SLOT, 6)],
        &[tag(3), tag(4)],
    );
    assert_eq!(pair.run(&table).terminal, Terminal::Done);
    let wrong = retain(&pair, 3, RetainMode::SharedTable, &[(0, 6)], &[tag(4)]);
    let completion = pair.run(&wrong);
    assert_eq!((completion.terminal, completion.reason), (Terminal::Rejected, 21));
    assert_eq!(
        pair.worker.tables().table(b"a-request", DecoderLayer(0)),
        Some((&[5, 6][..], 0))
    );
}

#[test]
fn x14_a_source_that_is_refilled_before_its_terminal_shows_as_wrong_bytes() {
    let mut pair = filled("sample", Adversary::late(6));
    let draft = pair.upload(1, &[(3, 5)]);
    pair.producer.publish(&draft).expect("published");
    pair.now_ns += 1;
    pair.worker.step(pair.now_ns).expect("worker");
    // The lease says that block 3 may not be refilled yet; this refill ignores it.
    assert_eq!(
        pair.producer.leases().source_leases(GroupId(0), SourceBlock(3)),
        pair.map.geometry().layers.len() as u32
    );
    pair.fill(GroupId(0), 3, 77);
    assert_eq!(pair.settle().map(|c| c.terminal), Some(Terminal::Done));
    assert!(
        pair.worker.counts().mismatched_bytes > 0,
        "the adversarial device must catch an early reuse"
    );
}

#[test]
fn x15_an_abort_supersedes_what_has_not_started_and_drains_what_runs() {
    // Not started: both records are read in one step.
    let mut pair = filled("sample", Adversary::late(7));
    let position = pair.producer.publish(&pair.upload(1, &[(3, 5)])).expect("published");
    let mut abort = PlanDraft::new();
    abort.abort(b"a-request", request(1), position);
    pair.now_ns += 1;
    pair.worker.step(pair.now_ns).expect("submitted");
    pair.producer.publish(&abort).expect("abort passes");
    let ended: Vec<_> = (0..2).filter_map(|_| pair.settle()).map(|c| c.terminal).collect();
    assert_eq!(ended, [Terminal::Superseded, Terminal::Done]);
    assert_eq!(pair.producer.leases().leased_blocks(), 0);
    assert!(
        pair.worker.tables().get(b"a-request").is_none(),
        "an aborted upload leaves no state"
    );
    // The planted fault: a worker that ignores the Abort answers Done.
    let ended = with_planted("x15_abort_ignored", || {
        let position = pair.producer.publish(&pair.upload(2, &[(3, 5)])).expect("published");
        abort.abort(b"a-request", request(2), position);
        pair.producer.publish(&abort).expect("abort passes");
        (0..2)
            .filter_map(|_| pair.settle())
            .map(|c| c.terminal)
            .collect::<Vec<_>>()
    });
    assert_eq!(ended, [Terminal::Done, Terminal::Done]);
}

#[test]
fn x24a_a_reset_supersedes_what_waits_empties_the_tables_and_sets_the_generation() {
    let mut pair = filled("sample", Adversary::late(8));
    let upload = pair.upload(1, &[(3, 5)]);
    assert_eq!(pair.run(&upload).terminal, Terminal::Done);
    let mut reset = PlanDraft::new();
    reset.reset(PoolGeneration(2));
    assert_eq!(pair.run(&reset).terminal, Terminal::Done);
    assert_eq!(pair.worker.tables().export().count(), 0);
    assert_eq!(pair.worker.port().generation(), PoolGeneration(2));
    let stale = pair.run(&upload);
    assert_eq!(
        (stale.terminal, stale.reason),
        (Terminal::Rejected, 20),
        "a record of the old generation"
    );
}

#[test]
fn field_22_an_upload_fails_whichever_of_its_rows_failed() {
    let layers = preset("sample").expect("preset").layers.len() as u64;
    for row in 0..layers {
        let mut pair = filled("sample", Adversary::late(9).with(row, Fault::FailCopy));
        let draft = pair.upload(1, &[(3, 5)]);
        assert_eq!(pair.run(&draft).terminal, Terminal::Failed, "row {row}");
    }
    let mut pair = filled("sample", Adversary::late(9).with(0, Fault::FailCopy));
    let draft = pair.upload(1, &[(3, 5)]);
    let ended = with_planted("x12_last_event_decides", || pair.run(&draft));
    assert_eq!(ended.terminal, Terminal::Done, "the planted fault");
}

#[test]
fn x24a_after_a_reset_no_table_in_device_memory_names_a_block() {
    let first_word = || {
        let mut pair = filled("sample", Adversary::late(9));
        let upload = pair.upload(1, &[(3, 5)]);
        assert_eq!(pair.run(&upload).terminal, Terminal::Done);
        let table = retain(&pair, 2, RetainMode::SharedTable, &[(NEW_SLOT, 5)], &[tag(3)]);
        assert_eq!(pair.run(&table).terminal, Terminal::Done);
        let slot = pair.worker.tables().get(b"a-request").expect("request").slot();
        let mut reset = PlanDraft::new();
        reset.reset(PoolGeneration(2));
        assert_eq!(pair.run(&reset).terminal, Terminal::Done);
        let (found, word) = std::sync::mpsc::channel();
        let kernel = move |memory: &KernelMemory<'_>| {
            let _ = found.send(memory.word(memory.table(slot).expect("slot"), ROW_HEADER_WORDS));
            KernelState::Finished
        };
        pair.worker.device_mut().engine().launch(kernel).expect("launched");
        pair.stepper.run();
        word.try_recv().expect("the kernel ran")
    };
    assert_eq!(first_word(), Some(TABLE_POISON));
    let planted = with_planted("x24a_reset_keeps_device_tables", first_word);
    assert_eq!(planted, Some(5), "the planted fault is not seen");
}

#[test]
fn r59_an_operation_that_cannot_be_verified_fails_and_changes_no_table() {
    let play = |at| {
        let mut pair = filled("sample", Adversary::late(10).with(at, Fault::FailCopy));
        let upload = pair.upload(1, &[(3, 5)]);
        if pair.run(&upload).terminal != Terminal::Done {
            assert!(
                pair.worker.tables().get(b"a-request").is_none(),
                "submit {at}: nothing is owned"
            );
            return 'u';
        }
        let table = retain(&pair, 2, RetainMode::LayerTables, &[(NEW_SLOT, 5)], &[tag(3)]);
        let ended = pair.run(&table).terminal;
        let view = pair.worker.tables().get(b"a-request").expect("request");
        let layer = pair
            .worker
            .tables()
            .table(b"a-request", DecoderLayer(0))
            .expect("table");
        if ended == Terminal::Done {
            assert_eq!(layer.0, [5]);
            return '-';
        }
        assert_eq!((view.map_revision(), layer.0), (MapRevision(1), &[][..]), "submit {at}");
        'r'
    };
    let ends: String = (0..).map(play).take_while(|end| *end != '-').collect();
    let layers = preset("sample").expect("preset").layers.len();
    let (uploads, retains) = (ends.matches('u').count(), ends.matches('r').count());
    // Every layer is copied once and read back, for the upload and for the table.
    assert!(uploads >= 2 * layers && retains >= layers, "{ends}");
    let first_read = layers as u64;
    let planted = with_planted("r59_unverified_applies", || play(first_read));
    assert_ne!(planted, 'u', "the planted fault");
}

#[test]
fn r59_x24a_x25_a_change_of_tables_that_fails_leaves_the_rank_without_a_generation_until_a_reset() {
    // A byte move gives block 7 to the request. Where it fails, the device may have a table that names 7, which is free
    // again: nothing may be written there before a Reset, whoever the producer is.
    let play = |at| {
        let mut pair = filled("sample", Adversary::late(12).with(at, Fault::FailCopy));
        let drafts = [
            pair.upload(1, &[(3, 5)]),
            retain(&pair, 2, RetainMode::LayerTables, &[(NEW_SLOT, 5)], &[tag(3)]),
            retain(&pair, 3, RetainMode::ByteMove, &[(5, 7)], &[tag(3)]),
        ];
        let failed = drafts
            .iter()
            .position(|draft| pair.run(draft).terminal != Terminal::Done)?;
        let left = (pair.worker.port().generation(), pair.producer.closed().is_some());
        let mut reset = PlanDraft::new();
        reset.reset(PoolGeneration(2));
        assert_eq!(pair.run(&reset).terminal, Terminal::Done, "submit {at}");
        assert_eq!(pair.worker.port().generation(), PoolGeneration(2), "submit {at}");
        assert_eq!(pair.producer.closed(), None, "submit {at}");
        Some((failed, left))
    };
    let all = || (0..).map_while(play).collect::<Vec<_>>();
    let ended = all();
    for (at, (failed, left)) in ended.iter().enumerate() {
        let expected = match failed {
            0 => (PoolGeneration(1), false), // an upload changes no table
            _ => (PoolGeneration(0), true),
        };
        assert_eq!(*left, expected, "submit {at}, draft {failed}");
    }
    for draft in 0..3 {
        assert!(
            ended.iter().any(|(failed, _)| *failed == draft),
            "draft {draft} never failed"
        );
    }
    let planted = with_planted("r59_x25_undefined_tables_are_reported", all);
    assert!(
        planted
            .iter()
            .all(|(_, (generation, closed))| (generation.0, *closed) == (1, false)),
        "the planted fault"
    );
}

#[test]
fn x24a_a_reset_is_done_whatever_failed_before_it() {
    // By submit that fails: how the Resets ended that came then. Compute waits for new tables, so what fails there is
    // passed on to compute, and from there by the next fence to the copies.
    let resets_after = |at| {
        let mut pair = filled("sample", Adversary::late(11).with(at, Fault::FailCopy));
        let tables = [&[(NEW_SLOT, 5), (NEW_SLOT, 6)], &[(6, 5), (5, 6)]];
        let drafts = [
            pair.upload(1, &[(3, 5), (4, 6)]),
            retain(&pair, 2, RetainMode::LayerTables, tables[0], &[tag(3), tag(4)]),
            retain(&pair, 3, RetainMode::ByteMove, tables[1], &[tag(4), tag(3)]),
        ];
        drafts
            .iter()
            .any(|draft| pair.run(draft).terminal != Terminal::Done)
            .then(|| {
                [2, 3, 4].map(|generation| {
                    let mut reset = PlanDraft::new();
                    reset.reset(PoolGeneration(generation));
                    pair.run(&reset).terminal
                })
            })
    };
    let all = || (0..).map_while(resets_after).collect::<Vec<_>>();
    let ended = all();
    assert!(ended.len() > 8, "{} submits failed", ended.len());
    assert!(
        ended.iter().flatten().all(|ended| *ended == Terminal::Done),
        "{ended:?}"
    );
    let planted = with_planted("x24a_reset_inherits_failures", all);
    assert!(
        planted.iter().flatten().any(|ended| *ended == Terminal::Failed),
        "the planted fault"
    );
}

#[test]
fn d5_an_operation_for_which_a_stalled_device_has_no_room_ends_with_the_device() {
    let steps = || {
        let mut pair = Rig::with("sample", Adversary::default(), Some((16, 1_000_000)));
        // A kernel that never ends, and as many behind it as fit.
        let engine = pair.worker.device_mut().engine();
        for _ in 0..2 {
            while engine.launch(|_: &KernelMemory<'_>| KernelState::Again).is_ok() {}
            pair.stepper.step();
        }
        pair.producer.publish(&pair.upload(1, &[(3, 5)])).expect("published");
        for _ in 0..100 {
            pair.now_ns += 100_000;
            pair.stepper.step();
            if let Err(error) = pair.worker.step(pair.now_ns) {
                pair.producer.poll_thorough();
                return Some((error, pair.producer.next_completion().map(|ended| ended.terminal)));
            }
        }
        None
    };
    let lost = WorkerError::DeviceLost(DeviceLost::Condemned);
    assert_eq!(steps(), Some((lost, Some(Terminal::Failed))));
    assert_eq!(
        with_planted("d5_want_of_room_is_no_run", steps),
        None,
        "the planted fault"
    );
}
