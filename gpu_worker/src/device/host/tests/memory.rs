//! Memory that a device may touch: bounds, chunks, pinning all or none, an adopted pool.

use kvsluice_layout::planted::with_planted;

use super::*;
use crate::device::{AdoptedPool, PlaceFault, PoolMemory, RegisterFault};

#[test]
fn x9_a_fragment_outside_its_memory_is_refused_and_nothing_is_queued() {
    let segment = Segment::new(256);
    let other = Segment::new(64);
    let (mut device, mut stepper, region) = stepped(128, &segment, Adversary::default());
    let read_only = device.register_all(other.span(Access::ReadOnly), &[64]).unwrap();
    let stale = {
        let gone = Segment::new(64);
        let id = device.register_all(gone.span(Access::ReadOnly), &[64]).unwrap();
        device.unregister(id).unwrap();
        id
    };
    let cases = [
        (upload(region, 0, 0, 0), PlaceFault::Empty),
        (
            upload(region, 200, 0, 57),
            PlaceFault::Host {
                offset: 200,
                bytes: 57,
                region_bytes: 256,
            },
        ),
        (
            upload(region, u64::MAX, 0, 2),
            PlaceFault::Host {
                offset: u64::MAX,
                bytes: 2,
                region_bytes: 256,
            },
        ),
        (
            upload(region, 0, 127, 2),
            PlaceFault::Device {
                offset: 127,
                bytes: 2,
                pool_bytes: 128,
            },
        ),
        (
            upload(region, 0, u64::MAX, 2),
            PlaceFault::Device {
                offset: u64::MAX,
                bytes: 2,
                pool_bytes: 128,
            },
        ),
        (upload(stale, 0, 0, 8), PlaceFault::Region { region: stale }),
        (
            write_back(read_only, 0, 0, 8),
            PlaceFault::ReadOnly { region: read_only },
        ),
        (
            Fragment::Move {
                from: 0,
                to: 7,
                bytes: 8,
            },
            PlaceFault::Overlap {
                from: 0,
                to: 7,
                bytes: 8,
            },
        ),
        (
            Fragment::Move {
                from: 0,
                to: 125,
                bytes: 8,
            },
            PlaceFault::Device {
                offset: 125,
                bytes: 8,
                pool_bytes: 128,
            },
        ),
    ];
    for (fragment, fault) in cases {
        let refused = device.submit(Queue::CopyIn, &[upload(region, 0, 0, 8), fragment]);
        assert_eq!(
            refused,
            Err(SubmitError::Place {
                index: 1,
                count: 2,
                fault
            })
        );
        assert_eq!(stepper.step(), Step::Idle, "{fragment:?} left something behind");
    }
    drop(device);
}

#[test]
fn x31_a_chunk_that_is_refused_unpins_the_whole_region_and_leaves_no_sticky_error() {
    let run = || {
        let segment = Segment::new(256);
        let (mut device, mut stepper, region) = {
            let small = Segment::new(64);
            let adversary = Adversary::default().with(3, Fault::RefusePin);
            let (mut device, stepper, first) = stepped(64, &small, adversary);
            device.unregister(first).unwrap();
            let region = device
                .register(segment.span(Access::ReadOnly), &[64, 128, 256])
                .unwrap();
            (device, stepper, region)
        };
        assert_eq!(device.pin_next(region), Ok(Pinned { bytes: 64, of: 256 }));
        assert_eq!(device.pin_next(region), Ok(Pinned { bytes: 128, of: 256 }));
        device.submit(Queue::CopyIn, &[upload(region, 64, 0, 64)]).unwrap();
        let place = PlaceFault::NotPinned {
            offset: 128,
            bytes: 64,
            pinned: 128,
        };
        let refused = device.submit(Queue::CopyIn, &[upload(region, 128, 0, 64)]);
        assert_eq!(
            refused,
            Err(SubmitError::Place {
                index: 0,
                count: 1,
                fault: place
            })
        );
        let refused = device.pin_next(region).unwrap_err();
        let fault = RegisterFault::DriverMemory { code: 2 };
        assert_eq!(
            refused,
            RegisterError::Pin {
                chunk: 2,
                chunks: 3,
                bytes: 128,
                pinned: 128,
                fault
            }
        );
        assert!(refused.to_string().contains("use smaller chunks"), "{refused}");
        assert_eq!(device.pinned_chunks(), 2, "a queued copy still reads them");
        stepper.run();
        let innocent = device.submit(
            Queue::Compute,
            &[Fragment::Move {
                from: 0,
                to: 32,
                bytes: 32,
            }],
        );
        (device.pinned_chunks(), innocent.is_ok())
    };
    assert_eq!(run(), (0, true));
    assert_eq!(
        with_planted("sticky_pin_error", run),
        (0, false),
        "field bug 9 goes unnoticed"
    );
}

#[test]
fn x31_a_refused_chunk_of_an_idle_region_is_undone_at_once() {
    let run = || {
        let segment = Segment::new(128);
        let adversary = Adversary::default().with(1, Fault::RefusePin);
        let mut device = HostDevice::stepped(small(64), adversary).unwrap();
        assert!(device.register_all(segment.span(Access::ReadOnly), &[64, 128]).is_err());
        let pinned = device.pinned_chunks();
        let again = device.register_all(segment.span(Access::ReadOnly), &[64, 128]).is_ok();
        (pinned, again)
    };
    assert_eq!(run(), (0, true));
    assert_eq!(with_planted("pin_leak", run), (1, false));
}

#[test]
fn field_12_a_copy_never_crosses_two_pinned_chunks() {
    let segment = Segment::new(256);
    let mut device = HostDevice::stepped(small(256), Adversary::default()).unwrap();
    let region = device
        .register_all(segment.span(Access::ReadOnly), &[64, 192, 256])
        .unwrap();
    for (host, bytes, chunk_end) in [(0, 65, 64), (63, 2, 64), (64, 129, 192), (191, 2, 192), (0, 256, 64)] {
        let fault = PlaceFault::Chunk {
            offset: host,
            bytes,
            chunk_end,
        };
        let refused = device.submit(Queue::CopyIn, &[upload(region, host, 0, bytes)]);
        assert_eq!(
            refused,
            Err(SubmitError::Place {
                index: 0,
                count: 1,
                fault
            })
        );
    }
    for (host, bytes) in [(0, 64), (64, 128), (192, 64)] {
        device.submit(Queue::CopyIn, &[upload(region, host, 0, bytes)]).unwrap();
    }
    assert!(matches!(
        device.unregister(region),
        Err(UnregisterError::Busy { submits: 3, .. })
    ));
    device.stepper().run();
    device.unregister(region).unwrap();
    for ends in [[].as_slice(), &[64], &[64, 64, 256], &[300]] {
        let refused = device.register(segment.span(Access::ReadOnly), ends);
        assert!(matches!(refused, Err(RegisterError::Chunks { .. })), "{ends:?}");
    }
}

#[test]
fn d1_an_adopted_pool_is_used_in_place() {
    let pool = Segment::new(128);
    let segment = Segment::new(64);
    segment.fill(0, 64, 9);
    let address = pool.base.expose_provenance() as u64;
    let mut spec = small(0);
    // SAFETY: `pool` outlives the device, and is read only when nothing is queued.
    spec.pool = PoolMemory::Adopt(unsafe { AdoptedPool::new(address, 128) });
    let mut device = HostDevice::stepped(spec, Adversary::default()).unwrap();
    let region = device.register_all(segment.span(Access::ReadOnly), &[64]).unwrap();
    device.submit(Queue::CopyIn, &[upload(region, 0, 64, 64)]).unwrap();
    device.stepper().run();
    assert_eq!(pool.bytes(64, 64), vec![9; 64]);
    let overlapping = device.register(pool.span(Access::ReadOnly), &[128]);
    assert_eq!(
        overlapping,
        Err(RegisterError::Overlap {
            bytes: 128,
            with: "the block pool"
        })
    );
    drop(device);
}
