use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use kvsluice_layout::ids::Rank;
use kvsluice_layout::planted::with_planted;
use rustix::fs::{MemfdFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::names::ChannelName;

const RANK: SegmentKind = SegmentKind::Rank(Rank(3));

fn new(kind: SegmentKind, bytes: usize) -> NewSegment {
    NewSegment {
        kind,
        bytes,
        layout_hash: 0x1a,
        channel: ChannelId(0x2b),
        creator_epoch: ProcessEpoch(0x3c),
    }
}

fn make(backend: &dyn Backend, kind: SegmentKind) -> Created {
    let created = create(backend, &new(kind, 10_000), &Reserve::default()).unwrap();
    created.memory.store(4096, 77);
    created.make_ready();
    created
}

fn wanted(kind: SegmentKind, mode: Mode, peers: &Peers) -> Wanted<'_> {
    Wanted {
        kind,
        mode,
        layout_hash: 0x1a,
        channel: Some(ChannelId(0x2b)),
        creator_epoch: None,
        peers,
    }
}

fn refusal(descriptor: &OwnedFd, kind: SegmentKind, mode: Mode) -> String {
    let error = open_reader(descriptor, &wanted(kind, mode, &Peers::default())).err();
    error.expect("a bad segment was mapped").to_string()
}

fn channel() -> ChannelName {
    ChannelName::new("engine").unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("kvsluice-test")
        .tempdir_in("/dev/shm")
        .unwrap()
}

fn persistent(folder: &Path) -> Persistent {
    Persistent::open(folder, channel()).unwrap()
}

#[test]
fn x3_a_segment_is_refused_until_its_ready_word_is_stored() {
    let created = create(&Memfd { hardened: false }, &new(RANK, 10_000), &Reserve::default()).unwrap();
    assert_eq!(created.memory.size(), 12_288, "rounded up to whole pages");
    let said = refusal(&created.descriptor, RANK, Mode::Memfd);
    assert!(said.contains("ready word is 0000000000000000"), "{said}");
    created.make_ready();
    let peers = Peers::default();
    open_reader(&created.descriptor, &wanted(RANK, Mode::Memfd, &peers)).unwrap();

    let mut other = wanted(RANK, Mode::Memfd, &peers);
    other.layout_hash = 0x99;
    let said = open_reader(&created.descriptor, &other).err().unwrap().to_string();
    assert!(
        said.contains("layout hash is 000000000000001a, expected 0000000000000099"),
        "{said}"
    );
}

#[test]
fn x3a_a_segment_cannot_change_its_size_and_is_not_inherited_by_exec() {
    for hardened in [false, true] {
        let created = make(&Memfd { hardened }, SegmentKind::Pool);
        assert_eq!(ftruncate(&created.descriptor, 0), Err(rustix::io::Errno::PERM));
        assert_eq!(ftruncate(&created.descriptor, 1 << 20), Err(rustix::io::Errno::PERM));
        let flags = rustix::io::fcntl_getfd(&created.descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let flags = rustix::io::fcntl_getfd(reopen_read_only(&created.descriptor).unwrap()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn x1_x3a_a_worker_cannot_write_what_it_gets_for_reading() {
    let created = make(&Memfd { hardened: false }, SegmentKind::Pool);
    let reader = reopen_read_only(&created.descriptor).unwrap();
    let denied = MappingMut::writable(&reader, 4096).err().unwrap();
    assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
    let peers = Peers::default();
    let map = open_reader(&reader, &wanted(SegmentKind::Pool, Mode::Memfd, &peers)).unwrap();
    assert_eq!(map.load(4096), 77);
}

#[test]
fn x3a_a_rank_segment_is_writable_for_its_rank_and_readable_for_the_producer() {
    for hardened in [false, true] {
        let backend = Memfd { hardened };
        let (descriptor, producer) = make(&backend, RANK).hand_over().unwrap();
        let peers = Peers::default();
        let worker = open_writer(&descriptor, &wanted(RANK, backend.mode(), &peers)).unwrap();
        worker.store_release(8192, 5);
        assert_eq!(producer.load_acquire(8192), 5);
    }
}

#[test]
fn x21_a_surviving_memfd_can_be_written_by_a_new_producer_and_a_hardened_one_by_nobody() {
    let created = make(&Memfd { hardened: false }, SegmentKind::Control);
    let survivor = reopen_read_only(&created.descriptor).unwrap();
    drop(created);
    let peers = Peers::default();
    let again = reopen_writable(&survivor, SegmentKind::Control, Mode::Memfd).unwrap();
    let map = open_writer(&again, &wanted(SegmentKind::Control, Mode::Memfd, &peers)).unwrap();
    map.store(4096, 78);
    assert_eq!(map.load(4096), 78);

    let created = make(&Memfd { hardened: true }, SegmentKind::Control);
    let said = reopen_writable(&created.descriptor, SegmentKind::Control, Mode::Hardened)
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("control segment is sealed against new writers (hardened mode): start cold"),
        "{said}"
    );
    // Not even by the back door.
    let back_door = reopen(&created.descriptor, OFlags::RDWR).unwrap();
    assert_eq!(
        MappingMut::writable(&back_door, 4096).err().unwrap().kind(),
        io::ErrorKind::PermissionDenied
    );
    assert!(rustix::io::pwrite(&back_door, &[1], 4096).is_err());
    assert_eq!(created.memory.load(4096), 77);
    created.memory.store(4096, 79);
}

#[test]
fn x3a_a_descriptor_is_checked_before_it_is_mapped() {
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let said = refusal(&pipe, RANK, Mode::Memfd);
    assert!(said.contains("rank-3 segment refused: type is"), "{said}");

    let plain = memfd_create("plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&plain, 8192).unwrap();
    let said = refusal(&plain, RANK, Mode::Memfd);
    assert!(
        said.contains("seals is SealFlags(0x0), expected SealFlags(SEAL | SHRINK | GROW)"),
        "{said}"
    );
    fcntl_add_seals(&plain, memfd::SIZE_SEALS).unwrap();
    let said = refusal(&plain, RANK, Mode::Memfd);
    assert!(said.contains("reserved bytes is 0, expected 8192"), "{said}");
    fallocate(&plain, rustix::fs::FallocateFlags::empty(), 0, 8192).unwrap();
    let said = refusal(&plain, RANK, Mode::Memfd);
    assert!(said.contains("magic is 0000000000000000"), "{said}");

    // A soft pool among hardened peers.
    let created = make(&Memfd { hardened: false }, SegmentKind::Pool);
    let said = refusal(&created.descriptor, SegmentKind::Pool, Mode::Hardened);
    assert!(
        said.contains("expected SealFlags(SEAL | SHRINK | GROW | FUTURE_WRITE)"),
        "{said}"
    );
    // Handed over for another role, and without a name among named ones.
    let said = refusal(&created.descriptor, SegmentKind::Control, Mode::Memfd);
    assert!(
        said.contains("control segment refused: segment kind is 3, expected 1"),
        "{said}"
    );

    let disk: OwnedFd = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap().into();
    let said = refusal(&disk, SegmentKind::Pool, Mode::Persistent);
    assert!(said.contains("file system is"), "{said}");
}

#[test]
fn x3a_and_x30_a_maker_that_forgets_to_seal_or_to_reserve_is_found_out() {
    let forgets = |fault| with_planted(fault, || make(&Memfd { hardened: false }, SegmentKind::Pool));
    let said = refusal(&forgets("x3a_unsealed").descriptor, SegmentKind::Pool, Mode::Memfd);
    assert!(said.contains("seals is"), "{said}");
    let said = refusal(&forgets("x30_unreserved").descriptor, SegmentKind::Pool, Mode::Memfd);
    assert!(said.contains("reserved bytes is"), "{said}");
}

#[test]
fn x30_more_than_the_machine_has_is_an_error_with_the_sizes() {
    let ask = |bytes, reserve: &Reserve| {
        let result = create(&Memfd { hardened: false }, &new(SegmentKind::Pool, bytes), reserve);
        result.err().expect("the impossible was reserved")
    };
    let error = ask(1 << 45, &Reserve::default());
    let CreateError::MemoryLimit {
        free_bytes,
        limit_bytes,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert!(free_bytes < 1 << 45 && free_bytes <= limit_bytes);
    assert!(error.to_string().contains("needs 35184372088832 bytes"), "{error}");
    assert!(
        error.to_string().ends_with("raise that limit or shrink the pool"),
        "{error}"
    );
    assert!(matches!(ask(1 << 47, &Reserve::default()), CreateError::Size { .. }));
    assert!(matches!(ask(usize::MAX, &Reserve::default()), CreateError::Size { .. }));
    assert!(matches!(ask(0, &Reserve::default()), CreateError::Size { .. }));

    let far = Reserve {
        numa_node: Some(900),
        ..Reserve::default()
    };
    let error = ask(8192, &far);
    assert!(
        matches!(
            error,
            CreateError::NumaNode { node: 900, .. } | CreateError::System { step: "place", .. }
        ),
        "{error}"
    );
}

#[test]
fn x30_huge_pages_that_are_not_free_are_an_error_with_the_numbers() {
    let huge = Reserve {
        huge_pages: Some(HugePages::TwoMiB),
        ..Reserve::default()
    };
    let Some(free) = crate::limits::Kernel::default().free_huge_pages(2 << 20) else {
        return eprintln!("this kernel has no huge pages of 2 MiB: nothing to run out of");
    };
    let bytes = usize::try_from((free + 1) << 21).unwrap();
    let error = create(&Memfd { hardened: false }, &new(SegmentKind::Pool, bytes), &huge)
        .err()
        .unwrap();
    let numbers = format!("needs {} huge pages of 2097152 bytes, {free} are free", free + 1);
    assert!(error.to_string().contains(&numbers), "{error}");
    // Only the pool takes them.
    create(&Memfd { hardened: false }, &new(RANK, 8192), &huge).unwrap();
    if free > 0 {
        let created = create(&Memfd { hardened: true }, &new(SegmentKind::Pool, 10_000), &huge).unwrap();
        created.make_ready();
        assert_eq!(created.memory.size(), 2 << 20);
        let peers = Peers::default();
        let wanted = wanted(SegmentKind::Pool, Mode::Hardened, &peers);
        assert_eq!(open_reader(&created.descriptor, &wanted).unwrap().size(), 2 << 20);
    }
}

/// Field 4: the 64 MB of a container's /dev/shm.
#[test]
fn x30_field_4_a_full_file_system_is_an_error_at_the_start() {
    const CHILD: &str = "KVSLUICE_TEST_SMALL_TMPFS";
    if let Some(folder) = std::env::var_os(CHILD) {
        let backend = persistent(Path::new(&folder));
        let error = create(&backend, &new(SegmentKind::Pool, 3 << 20), &Reserve::default())
            .err()
            .unwrap();
        assert!(
            matches!(
                error,
                CreateError::NoSpace {
                    asked_bytes: 3_145_728,
                    total_bytes: 2_097_152,
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("in a container --shm-size"), "{error}");
        assert!(
            backend.find(SegmentKind::Pool).unwrap().is_none(),
            "the failed segment left its name"
        );
        create(&backend, &new(SegmentKind::Pool, 1 << 20), &Reserve::default()).unwrap();
        let error = create(&backend, &new(SegmentKind::Control, (1 << 20) + 1), &Reserve::default())
            .err()
            .unwrap();
        assert!(matches!(error, CreateError::NoSpace { .. }), "{error}");
        return;
    }
    let folder = folder();
    let script = r#"mount -t tmpfs -o size=2m,mode=0700 kvsluice "$1" && exec "$2" --exact "$3" --nocapture"#;
    let name = std::thread::current().name().unwrap().to_owned();
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    command
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .arg(&name)
        .env(CHILD, folder.path());
    let Ok(output) = command.output() else {
        return eprintln!("no unshare here: a small file system cannot be mounted");
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !said.contains("running 1 test") {
        return eprintln!("a small file system cannot be mounted here: {said}");
    }
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn x21_a_named_segment_survives_its_maker_and_is_opened_only_if_it_is_safe() {
    let folder = folder();
    let backend = persistent(folder.path());
    assert!(backend.find(SegmentKind::Pool).unwrap().is_none());
    drop(make(&backend, SegmentKind::Pool));
    let path = folder.path().join("engine.pool");
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);

    let peers = Peers::default();
    let found = backend.find(SegmentKind::Pool).unwrap().unwrap();
    let map = open_writer(&found, &wanted(SegmentKind::Pool, Mode::Persistent, &peers)).unwrap();
    assert_eq!(map.load(4096), 77);
    let taken = create(&backend, &new(SegmentKind::Pool, 8192), &Reserve::default())
        .err()
        .unwrap();
    assert!(
        taken
            .to_string()
            .contains("cannot create the pool segment: File exists"),
        "{taken}"
    );

    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let said = backend.find(SegmentKind::Pool).unwrap_err().to_string();
    assert!(
        said.contains("engine.pool: mode is 0644, expected 0600; remove it"),
        "{said}"
    );
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::hard_link(&path, folder.path().join("second")).unwrap();
    let said = backend.find(SegmentKind::Pool).unwrap_err().to_string();
    assert!(said.contains("number of names is 2, expected 1"), "{said}");
    symlink(folder.path().join("second"), folder.path().join("engine.control")).unwrap();
    let said = backend.find(SegmentKind::Control).unwrap_err().to_string();
    assert!(
        said.contains("engine.control: type is a link, expected a plain file"),
        "{said}"
    );
}

#[test]
fn x27_field_7_a_late_removal_does_not_take_the_new_file_under_the_old_name() {
    let folder = folder();
    let backend = persistent(folder.path());
    let old = make(&backend, SegmentKind::Pool);
    let identity = Identity::of_descriptor(&old.descriptor).unwrap();
    std::fs::remove_file(folder.path().join("engine.pool")).unwrap();
    let new = make(&backend, SegmentKind::Pool);
    backend.discard(SegmentKind::Pool, identity).unwrap();
    assert!(backend.find(SegmentKind::Pool).unwrap().is_some());
    backend
        .discard(SegmentKind::Pool, Identity::of_descriptor(&new.descriptor).unwrap())
        .unwrap();
    assert!(backend.find(SegmentKind::Pool).unwrap().is_none());
    backend.discard(SegmentKind::Pool, identity).unwrap();
}

#[test]
fn x21_a_persistent_folder_must_be_memory_and_closed_to_others() {
    let said = Persistent::open(Path::new(env!("CARGO_MANIFEST_DIR")), channel())
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("expected tmpfs or hugetlbfs; give --persist a folder below /dev/shm"),
        "{said}"
    );
    let folder = folder();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let said = Persistent::open(folder.path(), channel()).unwrap_err().to_string();
    assert!(
        said.contains("mode is 777, expected 0700 or sticky; chmod 0700 the folder"),
        "{said}"
    );
    let link = folder.path().join("link");
    symlink(folder.path(), &link).unwrap();
    assert!(matches!(
        Persistent::open(&link, channel()),
        Err(PersistError::System { .. })
    ));
    Persistent::open(Path::new("/dev/shm"), channel()).unwrap();
}
