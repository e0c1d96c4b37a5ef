use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::ids::{
    ChannelId, DecoderLayer, DestinationBlock, OperationId, PhysicalBlock, PoolGeneration, ProcessEpoch, RequestEpoch,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::SourceKind;
use kvsluice_layout::region::{MIN_RING_BYTES, layout_hash};

use super::*;
use crate::charter::write_charter;
use crate::lock::RoleLock;
use crate::names::Role;
use crate::port::{Incoming, Outcome, Port, Ticket};
use crate::producer::Producer;
use crate::segment::{Backend, Created, Mapping, MappingMut, Memfd, NewSegment, Persistent, Reserve, create};
use crate::shared::SharedMut;
use crate::test_process::{Second, listen, part, say};

const PRODUCER: ProcessEpoch = ProcessEpoch(0xA11CE);
const BLOCKS: u32 = 64;

/// The worker that answers to a producer.
fn worker(producer: ProcessEpoch) -> ProcessEpoch {
    ProcessEpoch(producer.0 << 8)
}

/// A channel of one rank with real segments, both sides in this process.
struct Channel {
    producer: Producer<MappingMut, Mapping>,
    port: Port<Mapping, MappingMut>,
    control: MappingMut,
    /// As a producer and a worker hold them.
    _descriptors: [OwnedFd; 3],
}

impl Channel {
    fn make(backend: &dyn Backend, id: u64, epoch: ProcessEpoch) -> Self {
        let sizing = Sizing {
            source_blocks: Some(BLOCKS),
            device_blocks: Some(BLOCKS),
            ranks: Some(2),
            ..Sizing::default()
        };
        let geometry = sizing.apply(preset("sample").unwrap()).unwrap();
        let map = RegionMap::new(&geometry, MIN_RING_BYTES, 0, 64).unwrap();
        let made = |kind, bytes| -> Created {
            let segment = NewSegment {
                kind,
                bytes,
                layout_hash: layout_hash(),
                channel: ChannelId(id),
                creator_epoch: epoch,
            };
            create(backend, &segment, &Reserve::default()).unwrap()
        };
        let control = made(SegmentKind::Control, map.control_bytes());
        let pool = made(SegmentKind::Pool, 4096);
        let rank = made(SegmentKind::Rank(Rank(0)), map.rank_bytes());
        let kinds = SourceKinds {
            source_only: true,
            copy: false,
        };
        let capability = Capability::of(&geometry, SelectionUnit::Block, kinds, epoch);
        write_charter(&control.memory, &map, &Charter::new(&geometry, &map, &capability)).unwrap();
        for segment in [&control, &pool, &rank] {
            segment.make_ready();
        }
        let geometry = GeometryMap::new(&geometry).unwrap();
        let leases = || LeaseTable::new(&geometry);
        let mut producer = Producer::new(control.memory.clone(), map, leases(), epoch);
        let first = producer.join(Rank(0), rank.memory.reader().clone(), worker(epoch), std::process::id());
        let (reader, shape) = (control.memory.reader().clone(), producer.shape());
        let port = Port::new(reader, rank.memory, shape, leases(), worker(epoch), epoch, first);
        let mut channel = Self {
            producer,
            port,
            control: control.memory,
            _descriptors: [control.descriptor, pool.descriptor, rank.descriptor],
        };
        let mut reset = PlanDraft::new();
        channel.producer.publish(reset.reset(PoolGeneration(1))).unwrap();
        let ticket = channel.receive();
        channel.port.set_generation(PoolGeneration(1));
        channel.port.finish(ticket, &Outcome::done(0, 0, 0));
        channel.producer.poll();
        channel
    }

    fn receive(&mut self) -> Ticket {
        match self.port.receive() {
            Ok(Some(Incoming::Plan(ticket))) => ticket,
            other => panic!("{other:?}"),
        }
    }

    /// Every block that the producer holds a lease of: host, device.
    fn leased(&self) -> (usize, usize) {
        let leases = self.producer.leases();
        let count = |leased: &dyn Fn(u32) -> u32| (0..BLOCKS).filter(|block| leased(*block) != 0).count();
        (
            count(&|block| leases.source_leases(GroupId(0), SourceBlock(block))),
            count(&|block| leases.device_leases(GroupId(0), PhysicalBlock(block))),
        )
    }
}

fn operation(id: u64) -> Operation {
    Operation {
        request_epoch: RequestEpoch(1),
        operation_id: OperationId(id),
        pool_generation: PoolGeneration(1),
        ..Operation::default()
    }
}

fn upload(id: u64, pairs: &[(u32, u32)]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    let pairs = pairs.iter().map(|&(s, d)| (SourceBlock(s), DestinationBlock(d)));
    let operation = operation(id);
    draft
        .upload(b"re\x00quest", operation)
        .row(DecoderLayer(0), GroupId(0), SourceKind::SourceOnly, pairs);
    draft
}

fn target(folder: &Path, name: &str) -> Target {
    Target::of(name, folder).unwrap()
}

/// The second process: two channels, each with a producer that has published more than was answered.
fn live(folder: &str) {
    let runtime = RuntimeDir::open(folder.as_ref(), &Peers::default()).unwrap();
    let mut channels = Vec::new();
    for (name, id) in [("engine", 0xe0), ("other", 0x05), ("third", 0x32), ("fourth", 0x42)] {
        let dir = runtime.channel(&ChannelName::new(name).unwrap()).unwrap();
        // The last two belong to one process start.
        let epoch = ProcessEpoch(PRODUCER.0 + (id & 3));
        let roles = [(Role::Producer, epoch), (Role::Rank(Rank(0)), worker(epoch))];
        let locks = roles.map(|(role, epoch)| RoleLock::acquire(&dir, role, epoch, Duration::ZERO).unwrap());
        let hardened = name != "engine";
        channels.push((Channel::make(&Memfd { hardened }, id, epoch), locks));
    }
    // Rank 1 is missing, so data records pass only in a channel that does not know of it: publish straight.
    let channel = &mut channels[0].0;
    let said = channel.producer.publish(&upload(1, &[(3, 5)])).unwrap_err();
    say(&said.to_string());
    listen();
    let bytes = |channel: &Channel| {
        let mut words = vec![0; channel.control.size() / 8];
        channel.control.copy_out(0, &mut words);
        words
    };
    let before: Vec<_> = channels.iter().map(|(channel, _)| bytes(channel)).collect();
    say("look");
    listen();
    let after: Vec<_> = channels.iter().map(|(channel, _)| bytes(channel)).collect();
    let held = channels
        .iter()
        .flat_map(|(_, locks)| locks)
        .all(|lock| lock.check_still_there().is_ok());
    say(if before == after && held {
        "undisturbed"
    } else {
        "disturbed"
    });
    listen();
}

#[test]
fn x29_a_live_channel_is_read_through_its_holders_descriptors_and_does_not_notice() {
    if let Some(folder) = part() {
        return live(&folder);
    }
    let temp = tempfile::tempdir().unwrap();
    let mut second = Second::start(temp.path().to_str().unwrap());
    let said = second.hear();
    assert!(said.starts_with("rank 1 is missing"), "{said}");
    second.tell("go on");
    assert_eq!(second.hear(), "look");
    for (name, id, mode) in [
        ("engine", "00000000000000e0", "memfd"),
        ("other", "0000000000000005", "hardened"),
    ] {
        let found = inspect(&target(temp.path(), name)).unwrap();
        assert!(found.live && found.notes.is_empty(), "{found}");
        assert_eq!(found.roles.len(), 2);
        assert!(
            found
                .roles
                .iter()
                .all(|role| role.alive && role.pid == Some(second.pid())),
            "{found}"
        );
        let member = found.control.as_ref().unwrap().members[0].epoch.clone();
        assert_eq!(found.roles[1].epoch, member);
        let shown: Vec<_> = found.segments.iter().map(|segment| segment.segment.as_str()).collect();
        assert_eq!(shown, ["control", "pool", "rank-0"], "{found}");
        assert!(
            found
                .segments
                .iter()
                .all(|segment| segment.channel_id == id && segment.ready),
            "{found}"
        );
        assert_eq!(found.segments[0].mode, mode);
        let control = found.control.as_ref().unwrap();
        assert_eq!((control.incarnation, control.generation, control.reclaim), (1, 1, 0));
        assert_eq!(control.producer_epoch, found.segments[0].creator_epoch);
        assert_eq!(control.members[1].epoch, None);
        let [reset] = &control.journal[..] else {
            panic!("{found}")
        };
        let states: Vec<_> = reset.ranks.iter().map(|answer| answer.state).collect();
        assert_eq!((reset.kind, states), ("reset", vec!["done", "rank_lost"]));
        assert_eq!(found.ranks[0].consumed, control.tail);
        assert_eq!(control.directory[0].invalid, u64::from(BLOCKS));
        let text = found.to_string();
        assert!(
            text.contains("journal: 1 records") && text.contains("0=done 1=rank_lost"),
            "{text}"
        );
        assert!(
            serde_json::to_string(&found)
                .unwrap()
                .contains("\"state\":\"rank_lost\"")
        );
    }
    // Where one process start answers for two channels, nothing outside them says which is which.
    let third = inspect(&target(temp.path(), "third")).unwrap();
    assert!(third.notes[0].contains("2 channels of these processes"), "{third}");
    second.tell("compare");
    assert_eq!(second.hear(), "undisturbed");

    second.kill();
    let found = inspect(&target(temp.path(), "engine")).unwrap();
    assert!(!found.live && found.control.is_none() && found.roles.iter().all(|role| !role.alive));
    assert!(
        found.notes[0].contains("anonymous ones end with the processes that hold them"),
        "{found}"
    );
}

/// A persistent channel of one rank in a folder of its own.
fn persistent() -> (tempfile::TempDir, PathBuf, Channel) {
    let folder = tempfile::Builder::new()
        .prefix("kvsluice-test")
        .tempdir_in("/dev/shm")
        .unwrap();
    let named = Persistent::open(folder.path(), ChannelName::new("engine").unwrap()).unwrap();
    let mut channel = Channel::make(&named, 0xe0, PRODUCER);
    // The second rank only answers, from a segment of its own, that it is at the generation.
    let second = create(
        &named,
        &NewSegment {
            kind: SegmentKind::Rank(Rank(1)),
            bytes: channel.producer.map().rank_bytes(),
            layout_hash: layout_hash(),
            channel: ChannelId(0xe0),
            creator_epoch: PRODUCER,
        },
        &Reserve::default(),
    )
    .unwrap();
    second.memory.store(RANK_GENERATION_AT, 1);
    second.memory.store(WORKER_EPOCH_AT, 0xB1);
    second.make_ready();
    channel
        .producer
        .join(Rank(1), second.memory.reader().clone(), ProcessEpoch(0xB1), 7);
    let path = folder.path().join("engine.control");
    (folder, path, channel)
}

#[test]
fn x26_a_persistent_channel_is_read_by_its_path_when_everybody_is_dead() {
    let (folder, path, mut channel) = persistent();
    let positions = [(1, 3, 5), (2, 4, 6), (3, 4, 7)]
        .map(|(id, source, destination)| channel.producer.publish(&upload(id, &[(source, destination)])).unwrap());
    let mut abort = PlanDraft::new();
    channel
        .producer
        .publish(abort.abort(b"re\x00quest", operation(4), positions[2]))
        .unwrap();
    let tickets = [(); 2].map(|()| channel.receive());
    let [first, second] = tickets;
    channel.port.finish(first, &Outcome::done(64, 9, 0));
    channel.port.finish(second, &Outcome::failed());
    let map = channel.producer.map().clone();
    let entry = map.directory_at(GroupId(0), SourceBlock(9)).unwrap();
    channel.control.store(entry, 4 << 1 | DIRECTORY_VALID);
    channel
        .control
        .store(map.directory_at(GroupId(0), SourceBlock(10)).unwrap(), 4 << 1);

    let found = inspect(&Target::Control(path.clone())).unwrap();
    assert_eq!((found.live, &found.holders[..]), (true, &[std::process::id()][..]));
    let control = found.control.unwrap();
    let leased = channel.leased();
    let (tail, reclaim) = (channel.producer.tail(), channel.producer.reclaim());
    drop(channel);

    // The same for a folder, and for the dead.
    let text = format!("{}/", folder.path().display());
    let found = inspect(&Target::of(&text, Path::new("/")).unwrap()).unwrap();
    assert!(
        !found.live && found.roles.is_empty() && found.notes.is_empty(),
        "{found}"
    );
    assert_eq!(found.control.as_ref(), Some(&control));
    assert_eq!((control.tail, control.reclaim), (tail.0, reclaim.0));
    let of_kind: Vec<_> = control.journal.iter().map(|record| record.kind).collect();
    assert_eq!(of_kind, ["upload", "upload", "upload", "abort"]);
    let states: Vec<_> = control.journal.iter().map(|record| record.ranks[0].state).collect();
    assert_eq!(states, ["done", "failed", "open", "open"]);
    let states: Vec<_> = control.journal.iter().map(|record| record.ranks[1].state).collect();
    assert_eq!(states, ["open"; 4]);
    let third = &control.journal[2];
    assert_eq!(
        (third.request.as_str(), third.operation, third.rows, third.pairs),
        ("re\\x00quest", 3, 1, 1)
    );
    assert_eq!(control.journal[3].target, Some(third.position));
    // X14: what the producer holds.
    assert_eq!(
        (control.leases[0].source_blocks, control.leases[0].device_blocks),
        leased
    );
    assert_eq!(leased, (2, 3));
    assert_eq!(
        (control.directory[0].valid, control.directory[0].invalid),
        (1, u64::from(BLOCKS) - 1)
    );
    assert_eq!(control.model, "sample");
    assert_eq!(found.ranks.len(), 2);
    let text = found.to_string();
    assert!(
        text.contains("group 0: 2 host and 3 device blocks leased; 1 of 64 host blocks valid"),
        "{text}"
    );
}

/// Ends the other thread also where this one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn x29_a_channel_that_moves_on_meanwhile_is_never_seen_broken() {
    let (_folder, path, mut channel) = persistent();
    channel.producer.lose(Rank(1));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Abort and Reset pass without rank 1: Resets of the same generation, answered at once.
            let mut reset = PlanDraft::new();
            reset.reset(PoolGeneration(1));
            while !stop.load(Ordering::Relaxed) {
                if channel.producer.publish(&reset).is_ok() {
                    let ticket = channel.receive();
                    channel.port.finish(ticket, &Outcome::done(0, 0, 0));
                }
                channel.producer.poll();
                while channel.producer.next_completion().is_some() {}
            }
        });
        let _end = End(&stop);
        for look in 0..60 {
            let found = inspect(&Target::Control(path.clone())).unwrap();
            let control = found.control.as_ref().unwrap();
            assert!(found.notes.is_empty(), "look {look}: {found}");
            for pair in control.journal.windows(2) {
                assert_eq!(pair[0].position + pair[0].bytes, pair[1].position);
            }
            let answer = |record: &RecordReport| record.ranks[0].state;
            assert!(
                control
                    .journal
                    .iter()
                    .map(answer)
                    .all(|state| matches!(state, "open" | "done")),
                "{found}"
            );
        }
    });
}

#[test]
fn x33_hostile_bytes_are_reported_and_never_believed() {
    const SEED: u64 = 0x1257;
    let (folder, path, mut channel) = persistent();
    for id in 1..8 {
        channel
            .producer
            .publish(&upload(id, &[(id as u32, id as u32 + 8)]))
            .unwrap();
    }
    let files = ["engine.control", "engine.rank-0", "engine.rank-1"];
    let files = files.map(|file| {
        File::options()
            .read(true)
            .write(true)
            .open(folder.path().join(file))
            .unwrap()
    });
    let good: Vec<_> = files
        .iter()
        .map(|file| std::fs::read(format!("/proc/self/fd/{}", fd(file))).unwrap())
        .collect();
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut damaged = 0;
    for round in 0..400 {
        for _ in 0..=random.usize(..6) {
            let file = random.usize(..files.len());
            // Half of it where it hurts: header, words, charter and the first records.
            let bytes = if random.bool() { good[file].len() } else { 20 << 10 };
            let at = random.usize(..bytes / 8) as u64 * 8;
            let word = [0, u64::MAX, 1 << 63, random.u64(..), random.u64(..) >> 40][random.usize(..5)];
            files[file].write_all_at(&word.to_le_bytes(), at).unwrap();
        }
        let found = inspect(&Target::Control(path.clone())).unwrap_or_else(|error| panic!("seed {SEED:#x}: {error}"));
        damaged += usize::from(!found.notes.is_empty() || found.control.is_none());
        assert!(
            !found.to_string().is_empty() && serde_json::to_string(&found).is_ok(),
            "round {round}"
        );
        if round % 8 == 7 {
            files
                .iter()
                .zip(&good)
                .for_each(|(file, good)| file.write_all_at(good, 0).unwrap());
        }
    }
    assert!(
        damaged > 50,
        "the bytes that were changed are the ones that count: {damaged} of 400"
    );

    // A file that is cut short while its holders have it mapped is no SIGBUS for the reader.
    files
        .iter()
        .zip(&good)
        .for_each(|(file, good)| file.write_all_at(good, 0).unwrap());
    for bytes in [good[0].len() as u64 - 8, 24 << 10, 4096, 64, 0] {
        files[0].set_len(bytes).unwrap();
        match inspect(&Target::Control(path.clone())) {
            Ok(found) => assert!(
                found.control.is_none() && !found.notes.is_empty(),
                "{bytes} bytes: {found}"
            ),
            Err(error) => assert!(bytes < 128, "{bytes} bytes: {error}"),
        }
    }
    // Holes would cost the reader what they do not cost the writer.
    files[0].set_len(1 << 40).unwrap();
    let found = inspect(&Target::Control(path)).unwrap();
    assert!(found.control.is_none(), "{found}");
}

fn fd(file: &File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

#[test]
fn x21_what_is_no_channel_is_refused_with_a_remedy() {
    let temp = tempfile::tempdir().unwrap();
    let said = |text: &str| {
        let target = Target::of(text, &temp.path().join("none"));
        target.and_then(|target| inspect(&target)).unwrap_err().to_string()
    };
    assert!(said("engine").contains("no channel engine in "), "{}", said("engine"));
    assert!(!temp.path().join("none").exists(), "looking makes nothing");
    assert!(said("a b").contains("' ' is not allowed"));
    let folder = temp.path().to_str().unwrap();
    assert!(said(folder).contains("holds no file NAME.control"));
    assert!(said(&format!("{folder}/x.pool")).contains("is no file NAME.control"));
    assert!(said(&format!("{folder}/x.control")).contains("No such file"));
    std::fs::write(temp.path().join("x.control"), "short").unwrap();
    assert!(said(folder).contains("failed to fill whole buffer"), "{}", said(folder));
    std::fs::write(temp.path().join("y.control"), "short").unwrap();
    assert!(said(folder).contains("holds 2 channels"));
}
