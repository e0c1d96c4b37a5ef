//! Registered host memory: what a device may read and write on the host side, pinned chunk by chunk (X31).
//!
//! The bookkeeping is the same for every device; only `Pin` differs. Every copy is resolved here before it is queued,
//! so that no offset that a peer chose reaches a copy engine unchecked.

use thiserror::Error;

use super::DeviceLost;

/// Most regions a device holds: one bit each in the mask of a submit.
pub(crate) const REGIONS_MAX: usize = 64;

/// Whether a device may write host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device only reads: the pool, which is mapped read-only here.
    ReadOnly,
    /// The device reads and writes: the write-back area.
    ReadWrite,
}

/// Host memory that a device may use: a raw range, because another process writes it (X2).
#[derive(Debug)]
pub struct HostSpan {
    base: *mut u8,
    bytes: u64,
    access: Access,
}

// SAFETY: a span is an address and a promise about it (see `HostSpan::new`), and that promise names no thread.
unsafe impl Send for HostSpan {}

impl HostSpan {
    /// A range of `bytes` bytes from `base`.
    ///
    /// # Safety
    /// Until the region is unregistered or its device dropped, the range stays mapped, readable, and writable too where
    /// `access` says so; and this process holds no Rust reference to any byte that a queued copy writes.
    pub const unsafe fn new(base: *mut u8, bytes: u64, access: Access) -> Self {
        Self { base, bytes, access }
    }

    /// Size of the range in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A registered region. A plain handle: stale after unregistering, and then refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionId(u32);

impl RegionId {
    const fn new(index: usize, generation: u32) -> Self {
        Self(generation.wrapping_mul(REGIONS_MAX as u32) | index as u32)
    }

    const fn index(self) -> usize {
        self.0 as usize % REGIONS_MAX
    }
}

/// How far a region is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Bytes from the base that copies may use: the watermark of X31.
    pub bytes: u64,
    /// Size of the region.
    pub of: u64,
}

impl Pinned {
    /// True when the whole region may be used.
    pub const fn complete(self) -> bool {
        self.bytes == self.of
    }
}

/// What is wrong with the memory that a fragment names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlaceFault {
    /// No bytes to copy.
    #[error("it copies no bytes")]
    Empty,
    /// The region is not, or no longer, registered.
    #[error("{region:?} is not registered")]
    Region {
        /// The region named.
        region: RegionId,
    },
    /// Outside the region.
    #[error("host bytes {offset}+{bytes} are outside a region of {region_bytes} bytes")]
    Host {
        /// First byte, from the base of the region.
        offset: u64,
        /// Length.
        bytes: u64,
        /// Size of the region.
        region_bytes: u64,
    },
    /// Inside the region, in a chunk that is not pinned yet.
    #[error("host bytes {offset}+{bytes} are not pinned yet: the watermark is {pinned}")]
    NotPinned {
        /// First byte, from the base of the region.
        offset: u64,
        /// Length.
        bytes: u64,
        /// Bytes pinned so far.
        pinned: u64,
    },
    /// Across the end of a chunk, which no driver copies (field bug 12).
    #[error("host bytes {offset}+{bytes} cross the end of a pinned chunk at {chunk_end}")]
    Chunk {
        /// First byte, from the base of the region.
        offset: u64,
        /// Length.
        bytes: u64,
        /// The end that is crossed.
        chunk_end: u64,
    },
    /// A write to a region that the device may only read.
    #[error("{region:?} is read-only")]
    ReadOnly {
        /// The region named.
        region: RegionId,
    },
    /// Outside the block pool.
    #[error("device bytes {offset}+{bytes} are outside a pool of {pool_bytes} bytes")]
    Device {
        /// First byte, from the base of the pool.
        offset: u64,
        /// Length.
        bytes: u64,
        /// Size of the pool.
        pool_bytes: u64,
    },
    /// A move onto itself.
    #[error("it moves {bytes} bytes from {from} to {to}, which overlap")]
    Overlap {
        /// First byte read.
        from: u64,
        /// First byte written.
        to: u64,
        /// Length.
        bytes: u64,
    },
}

/// Why a driver did not pin a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegisterFault {
    /// The limit on locked memory.
    #[error("the memlock limit of {limit_bytes} bytes; raise it (ulimit -l, LimitMEMLOCK=, --ulimit memlock=-1)")]
    Memlock {
        /// The limit.
        limit_bytes: u64,
    },
    /// The driver has no memory or no room for that many pages in one call.
    #[error("the driver's own limit (code {code}); use smaller chunks, huge pages, or a smaller pool")]
    DriverMemory {
        /// The driver's code.
        code: u32,
    },
    /// The platform cannot pin memory that is mapped read-only.
    #[error("no support for read-only memory; use the memfd mode, or map the pool writable")]
    ReadOnly,
    /// The driver already has some of these pages.
    #[error("pages that are registered already; unregister them first")]
    AlreadyRegistered,
    /// Anything else.
    #[error("driver error {code}")]
    Driver {
        /// The driver's code.
        code: u32,
    },
}

/// Why host memory was not registered. Nothing of the region stays pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The device is lost.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// All places are taken.
    #[error("{max} regions are registered, which is the most; unregister one")]
    TooMany {
        /// The most.
        max: usize,
    },
    /// The chunk ends do not cut up the span.
    #[error("chunk {chunk} ends at {found}: ends must ascend from above 0 to the span's {bytes} bytes")]
    Chunks {
        /// Index of the chunk.
        chunk: usize,
        /// Its end.
        found: u64,
        /// Size of the span.
        bytes: u64,
    },
    /// The span overlaps a registered region or the block pool.
    #[error("the span of {bytes} bytes overlaps {with}; register each byte once")]
    Overlap {
        /// Size of the span.
        bytes: u64,
        /// What it overlaps.
        with: &'static str,
    },
    /// No such region.
    #[error("{region:?} is not registered")]
    Unknown {
        /// The handle.
        region: RegionId,
    },
    /// A chunk was refused; what was pinned before is unpinned again.
    #[error("chunk {chunk} of {chunks} ({bytes} bytes, after {pinned} pinned) hit {fault}")]
    Pin {
        /// Index of the chunk.
        chunk: usize,
        /// Number of chunks.
        chunks: usize,
        /// Size of the chunk.
        bytes: u64,
        /// Bytes of the region that were pinned before it.
        pinned: u64,
        /// What was hit, and the remedy.
        fault: RegisterFault,
    },
}

/// Why a region stays registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnregisterError {
    /// No such region.
    #[error("{region:?} is not registered")]
    Unknown {
        /// The handle.
        region: RegionId,
    },
    /// Copies that name it are queued.
    #[error("{region:?} is named by {submits} queued submits; wait for their events")]
    Busy {
        /// The region.
        region: RegionId,
        /// How many.
        submits: u32,
    },
}

/// How a device pins memory: the driver's part of registration.
pub(crate) trait Pin {
    /// Pins one chunk.
    fn pin(&mut self, base: *mut u8, bytes: u64, access: Access) -> Result<(), RegisterFault>;
    /// Unpins a chunk by the base it was pinned with.
    fn unpin(&mut self, base: *mut u8);
    /// Clears the error that a refused pin left in the driver, so that it does not surface elsewhere (X31).
    fn clear_sticky(&mut self);
}

struct Region {
    generation: u32,
    span: HostSpan,
    chunk_ends: Vec<u64>,
    /// Chunks pinned so far, in order.
    pinned: usize,
    /// Queued submits that name it.
    submits: u32,
    /// A later chunk failed while copies were queued: refuses everything, and goes with the last of them.
    failed: bool,
}

impl Region {
    fn chunk_start(&self, chunk: usize) -> u64 {
        chunk
            .checked_sub(1)
            .and_then(|before| self.chunk_ends.get(before))
            .copied()
            .unwrap_or(0)
    }

    fn pinned_bytes(&self) -> u64 {
        self.chunk_start(self.pinned)
    }

    fn unpin_all(&self, driver: &mut impl Pin) {
        for chunk in (0..self.pinned).rev() {
            driver.unpin(self.span.base.wrapping_add(self.chunk_start(chunk) as usize));
        }
    }

    fn overlaps(&self, base: u64, bytes: u64) -> bool {
        ranges_overlap(self.span.base as u64, self.span.bytes, base, bytes)
    }
}

/// True where two ranges share a byte. The ranges do not wrap.
pub(crate) const fn ranges_overlap(a: u64, a_bytes: u64, b: u64, b_bytes: u64) -> bool {
    a < b.saturating_add(b_bytes) && b < a.saturating_add(a_bytes)
}

/// The registered regions of a device.
pub(crate) struct Regions {
    places: Vec<Option<Region>>,
    generation: u32,
}

impl Regions {
    pub(crate) fn new() -> Self {
        Self {
            places: (0..REGIONS_MAX).map(|_| None).collect(),
            generation: 0,
        }
    }

    fn get_mut(&mut self, region: RegionId) -> Option<&mut Region> {
        let place = self.places.get_mut(region.index())?.as_mut()?;
        (RegionId::new(region.index(), place.generation) == region).then_some(place)
    }

    fn get(&self, region: RegionId) -> Option<&Region> {
        let place = self.places.get(region.index())?.as_ref()?;
        (RegionId::new(region.index(), place.generation) == region).then_some(place)
    }

    /// Admits `span`, of which nothing is pinned yet. `own` is memory of the device itself: (base, bytes).
    pub(crate) fn register(
        &mut self,
        span: HostSpan,
        chunk_ends: &[u64],
        own: (u64, u64),
    ) -> Result<RegionId, RegisterError> {
        let bytes = span.bytes;
        let mut before = 0;
        for (chunk, &found) in chunk_ends.iter().enumerate() {
            if found <= before || found > bytes {
                return Err(RegisterError::Chunks { chunk, found, bytes });
            }
            before = found;
        }
        if before != bytes || bytes == 0 {
            return Err(RegisterError::Chunks {
                chunk: chunk_ends.len(),
                found: before,
                bytes,
            });
        }
        let base = span.base as u64;
        if base.checked_add(bytes).is_none() {
            return Err(RegisterError::Overlap {
                bytes,
                with: "the end of the address space",
            });
        }
        if ranges_overlap(own.0, own.1, base, bytes) {
            return Err(RegisterError::Overlap {
                bytes,
                with: "the block pool",
            });
        }
        if self.places.iter().flatten().any(|other| other.overlaps(base, bytes)) {
            return Err(RegisterError::Overlap {
                bytes,
                with: "a registered region",
            });
        }
        let Some((index, place)) = self.places.iter_mut().enumerate().find(|(_, place)| place.is_none()) else {
            return Err(RegisterError::TooMany { max: REGIONS_MAX });
        };
        let generation = self.generation;
        self.generation = self.generation.wrapping_add(1);
        let chunk_ends = chunk_ends.to_vec();
        *place = Some(Region {
            generation,
            span,
            chunk_ends,
            pinned: 0,
            submits: 0,
            failed: false,
        });
        Ok(RegionId::new(index, generation))
    }

    /// Pins the next chunk. All or none: a refused chunk takes the region with it.
    pub(crate) fn pin_next(&mut self, id: RegionId, driver: &mut impl Pin) -> Result<Pinned, RegisterError> {
        let region = self
            .get_mut(id)
            .filter(|region| !region.failed)
            .ok_or(RegisterError::Unknown { region: id })?;
        let chunk = region.pinned;
        let of = region.span.bytes;
        let start = region.chunk_start(chunk);
        let Some(&end) = region.chunk_ends.get(chunk) else {
            return Ok(Pinned { bytes: of, of });
        };
        let base = region.span.base.wrapping_add(start as usize);
        if let Err(fault) = driver.pin(base, end - start, region.span.access) {
            if !kvsluice_layout::planted::planted("sticky_pin_error") {
                driver.clear_sticky(); // X31
            }
            let chunks = region.chunk_ends.len();
            region.failed = true;
            if !kvsluice_layout::planted::planted("pin_leak") {
                self.drop_failed(1 << id.index(), driver); // X31: all or none
            }
            return Err(RegisterError::Pin {
                chunk,
                chunks,
                bytes: end - start,
                pinned: start,
                fault,
            });
        }
        region.pinned += 1;
        Ok(Pinned { bytes: end, of })
    }

    /// Drops the failed regions of `mask` that no queued copy names any more.
    fn drop_failed(&mut self, mask: u64, driver: &mut impl Pin) {
        for index in bits(mask) {
            if self
                .places
                .get(index)
                .and_then(Option::as_ref)
                .is_some_and(|r| r.failed && r.submits == 0)
            {
                self.take(index, driver);
            }
        }
    }

    fn take(&mut self, index: usize, driver: &mut impl Pin) {
        if let Some(region) = self.places.get_mut(index).and_then(Option::take) {
            region.unpin_all(driver);
        }
    }

    /// Unpins and forgets a region.
    pub(crate) fn unregister(&mut self, id: RegionId, driver: &mut impl Pin) -> Result<(), UnregisterError> {
        let region = self.get(id).ok_or(UnregisterError::Unknown { region: id })?;
        if region.submits > 0 {
            return Err(UnregisterError::Busy {
                region: id,
                submits: region.submits,
            });
        }
        self.take(id.index(), driver);
        Ok(())
    }

    /// Unpins everything, when the device closes.
    pub(crate) fn clear(&mut self, driver: &mut impl Pin) {
        for index in 0..REGIONS_MAX {
            self.take(index, driver);
        }
    }

    /// The address of host bytes that a copy may use, and the region's bit for [`Regions::hold`].
    pub(crate) fn resolve(
        &self,
        id: RegionId,
        offset: u64,
        bytes: u64,
        write: bool,
    ) -> Result<(*mut u8, u64), PlaceFault> {
        let region = self
            .get(id)
            .filter(|region| !region.failed)
            .ok_or(PlaceFault::Region { region: id })?;
        let region_bytes = region.span.bytes;
        if bytes == 0 {
            return Err(PlaceFault::Empty);
        }
        let Some(end) = offset.checked_add(bytes).filter(|&end| end <= region_bytes) else {
            return Err(PlaceFault::Host {
                offset,
                bytes,
                region_bytes,
            });
        };
        let pinned = region.pinned_bytes();
        if end > pinned {
            return Err(PlaceFault::NotPinned { offset, bytes, pinned }); // X31
        }
        if region.chunk_ends.len() > 1 {
            let chunk = region.chunk_ends.partition_point(|&chunk_end| chunk_end <= offset);
            let chunk_end = region.chunk_ends.get(chunk).copied().unwrap_or(0);
            if end > chunk_end {
                return Err(PlaceFault::Chunk {
                    offset,
                    bytes,
                    chunk_end,
                }); // field bug 12
            }
        }
        if write && region.span.access == Access::ReadOnly {
            return Err(PlaceFault::ReadOnly { region: id });
        }
        Ok((region.span.base.wrapping_add(offset as usize), 1 << id.index()))
    }

    /// Keeps the regions of `mask` registered until the matching [`Regions::drop_hold`].
    pub(crate) fn hold(&mut self, mask: u64) {
        self.for_mask(mask, |region| region.submits += 1);
    }

    /// Ends one [`Regions::hold`] of the same mask.
    pub(crate) fn drop_hold(&mut self, mask: u64, driver: &mut impl Pin) {
        self.for_mask(mask, |region| region.submits -= 1);
        self.drop_failed(mask, driver);
    }

    fn for_mask(&mut self, mask: u64, mut act: impl FnMut(&mut Region)) {
        for index in bits(mask) {
            if let Some(region) = self.places.get_mut(index).and_then(Option::as_mut) {
                act(region);
            }
        }
    }
}

/// The places of the set bits of `mask`.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (index < REGIONS_MAX).then_some(index)
    })
}
