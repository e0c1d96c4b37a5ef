//! Space for a segment, reserved and pre-faulted in parallel, so that want of it is an error now and never a SIGBUS
//! later (X30).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvsluice_layout::planted::planted;
use kvsluice_layout::segment::{HEADER_BYTES, SegmentKind};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, fstat, fstatfs, ftruncate};
use rustix::io::Errno;

use super::mapping::MappingMut;
use super::persistent::is_hugetlbfs;
use crate::limits::Kernel;

/// Size of the huge pages to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// 2 MiB.
    TwoMiB,
    /// 1 GiB.
    OneGiB,
}

/// How a segment's memory is reserved.
#[derive(Clone, Debug, Default)]
pub struct Reserve {
    /// Huge pages for the pool. The persistent mode takes the page size of its folder's file system instead.
    pub huge_pages: Option<HugePages>,
    /// The NUMA node that every page must come from.
    pub numa_node: Option<u32>,
    /// Threads that touch pages; 0 takes one per core, at most 16.
    pub threads: usize,
}

/// Why a segment could not be made (X30). Nothing is left of it.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The size makes no sense.
    #[error("{segment} segment of {bytes} bytes: a segment has {HEADER_BYTES} bytes to 2^46")]
    Size {
        /// The segment.
        segment: SegmentKind,
        /// The size asked for.
        bytes: usize,
    },
    /// The file system that holds the segments is too small.
    #[error(
        "{segment} segment needs {asked_bytes} bytes, its file system has {free_bytes} free of {total_bytes}; \
         enlarge it (mount -o remount,size=...; in a container --shm-size) or shrink the pool"
    )]
    NoSpace {
        /// The segment.
        segment: SegmentKind,
        /// Bytes needed.
        asked_bytes: u64,
        /// Bytes free in the file system.
        free_bytes: u64,
        /// Size of the file system.
        total_bytes: u64,
    },
    /// A limit on memory leaves too little.
    #[error(
        "{segment} segment needs {asked_bytes} bytes, {limit} leaves {free_bytes} of {limit_bytes}; \
         raise that limit or shrink the pool"
    )]
    MemoryLimit {
        /// The segment.
        segment: SegmentKind,
        /// Bytes needed.
        asked_bytes: u64,
        /// What limits.
        limit: String,
        /// The limit.
        limit_bytes: u64,
        /// Bytes left below it.
        free_bytes: u64,
    },
    /// Too few huge pages are free.
    #[error(
        "{segment} segment needs {asked} huge pages of {page_bytes} bytes, {free} are free; reserve them \
         (/sys/kernel/mm/hugepages/hugepages-*/nr_hugepages) or run without huge pages"
    )]
    NoHugePages {
        /// The segment.
        segment: SegmentKind,
        /// Pages needed.
        asked: u64,
        /// Pages free.
        free: u64,
        /// Size of one.
        page_bytes: u64,
    },
    /// The NUMA node is not there.
    #[error("{segment} segment on NUMA node {node}: the nodes that are online are {online}")]
    NumaNode {
        /// The segment.
        segment: SegmentKind,
        /// The node asked for.
        node: u32,
        /// Nodes that exist.
        online: String,
    },
    /// The system refused.
    #[error("cannot {step} the {segment} segment: {source}")]
    System {
        /// The segment.
        segment: SegmentKind,
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// One thread reserves this much at a time. A signal throws one piece's reservation away, not the whole pool's.
const PIECE_BYTES: usize = 256 << 20;

/// Sizes, places, reserves and touches `descriptor`; returns it mapped, all zero.
pub(super) fn reserve(
    descriptor: &OwnedFd,
    segment: SegmentKind,
    bytes: usize,
    how: &Reserve,
) -> Result<MappingMut, CreateError> {
    let failed = |step| move |source: io::Error| CreateError::System { segment, step, source };
    let place = fstatfs(descriptor).map_err(|e| failed("look at")(e.into()))?;
    let huge = is_hugetlbfs(&place);
    // A hugetlb file's block is its page; a tmpfs file's block need not be.
    let page_bytes = if huge {
        let stat = fstat(descriptor).map_err(|e| failed("look at")(e.into()))?;
        usize::try_from(stat.st_blksize).unwrap_or(usize::MAX)
    } else {
        rustix::param::page_size()
    };
    let rounded = bytes
        .checked_next_multiple_of(page_bytes)
        .filter(|rounded| *rounded <= 1 << 46);
    let Some(size) = rounded.filter(|_| bytes >= HEADER_BYTES) else {
        return Err(CreateError::Size { segment, bytes });
    };
    let kernel = Kernel::default();
    let short = Shortage {
        segment,
        asked_bytes: size as u64,
        kernel: &kernel,
    };
    if huge {
        short.of_huge_pages(page_bytes as u64)?;
    } else {
        short.of_memory(how.numa_node)?;
        if place.f_blocks > 0 {
            short.of_space(&place)?;
        }
    }
    let want = |step| {
        let (place, short) = (&place, &short);
        move |source: io::Error| match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOSPC | Errno::NOMEM) if huge => short.huge_pages(page_bytes as u64),
            Some(Errno::NOSPC) => short.space(place),
            _ => CreateError::System { segment, step, source },
        }
    };
    ftruncate(descriptor, size as u64).map_err(|e| want("size")(e.into()))?;
    let memory = MappingMut::writable(descriptor, size).map_err(want("map"))?;
    if let Some(node) = how.numa_node {
        bind(&memory, size, node).map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) => CreateError::NumaNode {
                segment,
                node,
                online: kernel.numa_nodes(),
            },
            _ => failed("place")(source),
        })?;
    }
    // X30
    if !planted("x30_unreserved") {
        touch(descriptor, &memory, size, page_bytes, how.threads).map_err(want("reserve"))?;
    }
    Ok(memory)
}

/// What is missing, in numbers.
struct Shortage<'a> {
    segment: SegmentKind,
    asked_bytes: u64,
    kernel: &'a Kernel,
}

impl Shortage<'_> {
    fn of_memory(&self, node: Option<u32>) -> Result<(), CreateError> {
        let on_node = node.and_then(|node| {
            let free = self.kernel.node_free_bytes(node)?;
            Some((format!("NUMA node {node}"), free, free))
        });
        let overall = self
            .kernel
            .tightest_memory()
            .map(|limit| (limit.name, limit.limit_bytes, limit.free_bytes));
        match on_node.into_iter().chain(overall).min_by_key(|(_, _, free)| *free) {
            Some((limit, limit_bytes, free_bytes)) if free_bytes < self.asked_bytes => Err(CreateError::MemoryLimit {
                segment: self.segment,
                asked_bytes: self.asked_bytes,
                limit,
                limit_bytes,
                free_bytes,
            }),
            _ => Ok(()),
        }
    }

    fn of_space(&self, place: &rustix::fs::StatFs) -> Result<(), CreateError> {
        let short = space_bytes(place.f_bavail, place) < self.asked_bytes;
        if short { Err(self.space(place)) } else { Ok(()) }
    }

    fn of_huge_pages(&self, page_bytes: u64) -> Result<(), CreateError> {
        let free = self.kernel.free_huge_pages(page_bytes).unwrap_or(0);
        let short = free.saturating_mul(page_bytes) < self.asked_bytes;
        if short {
            Err(self.huge_pages(page_bytes))
        } else {
            Ok(())
        }
    }

    fn space(&self, place: &rustix::fs::StatFs) -> CreateError {
        CreateError::NoSpace {
            segment: self.segment,
            asked_bytes: self.asked_bytes,
            free_bytes: space_bytes(place.f_bavail, place),
            total_bytes: space_bytes(place.f_blocks, place),
        }
    }

    fn huge_pages(&self, page_bytes: u64) -> CreateError {
        CreateError::NoHugePages {
            segment: self.segment,
            asked: self.asked_bytes.div_ceil(page_bytes),
            free: self.kernel.free_huge_pages(page_bytes).unwrap_or(0),
            page_bytes,
        }
    }
}

fn space_bytes(blocks: u64, place: &rustix::fs::StatFs) -> u64 {
    blocks.saturating_mul(u64::try_from(place.f_bsize).unwrap_or(0))
}

/// Makes every page of the segment come from `node`, for all processes that map it.
fn bind(memory: &MappingMut, bytes: usize, node: u32) -> io::Result<()> {
    const NODES: usize = 1024;
    let mut mask = [0u64; NODES / 64];
    let Some(word) = mask.get_mut(node as usize / 64) else {
        return Err(Errno::INVAL.into());
    };
    *word = 1 << (node % 64);
    // SAFETY: the range is mapped by `memory`; the mask holds NODES bits, and the kernel reads one fewer than it is
    // told. The call changes where pages come from, never their bytes.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.base_mut_ptr(),
            bytes,
            libc::MPOL_BIND,
            mask.as_ptr(),
            NODES + 1,
            0,
        )
    };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reserves and touches the segment piece by piece, in parallel.
fn touch(descriptor: &OwnedFd, memory: &MappingMut, bytes: usize, page_bytes: usize, threads: usize) -> io::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(16));
    let threads = if threads == 0 { cores } else { threads };
    let piece = bytes.div_ceil(threads).min(PIECE_BYTES).next_multiple_of(page_bytes);
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<io::Error>> = Mutex::new(None);
    let work = || {
        loop {
            // Relaxed: the counter only hands out pieces; the threads are joined before anybody looks at the result.
            let at = next.fetch_add(piece, Ordering::Relaxed);
            if at >= bytes || failure.lock().is_some() {
                return;
            }
            let len = piece.min(bytes - at);
            if let Err(error) = touch_piece(descriptor, memory, at, len) {
                failure.lock().get_or_insert(error);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(bytes.div_ceil(piece)) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

fn touch_piece(descriptor: &OwnedFd, memory: &MappingMut, at: usize, len: usize) -> io::Result<()> {
    loop {
        match fallocate(descriptor, FallocateFlags::empty(), at as u64, len as u64) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    }
    memory.populate(at, len).map_err(|error| match error.raw_os_error() {
        // The kernel says EFAULT where a touch would have been a SIGBUS: there is no page.
        Some(libc::EFAULT) => Errno::NOSPC.into(),
        _ => error,
    })
}
