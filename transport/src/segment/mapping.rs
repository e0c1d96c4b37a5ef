//! A segment in this process's address space.
//!
//! [`Mapping`] may be read, [`MappingMut`] may also be written; whoever holds the first cannot get the second, so a
//! peer's segment cannot be stored to by mistake (X1). Neither ever hands out a reference to shared bytes (X2).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::death;
use crate::shared::{Shared, SharedMut};

/// A segment mapped for reading. Clones share one mapping, which is unmapped with the last of them.
#[derive(Clone)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Keeps `base` mapped.
    map: Arc<MmapRaw>,
}

// SAFETY: `base` points into `map`, which is itself Send and Sync, and is only used for atomic accesses and for copies
// whose callers vouch that no process writes the range meanwhile.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method needs exclusive access.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `segment` read-only.
    ///
    /// # Errors
    /// The system's error, or `InvalidInput` where the descriptor is shorter than `bytes` or `bytes` is not a positive
    /// multiple of 8: touching what is not there would be a SIGBUS (X30).
    pub fn read_only(segment: &OwnedFd, bytes: usize) -> io::Result<Self> {
        check_length(segment, bytes)?;
        Self::keep(MmapOptions::new().len(bytes).map_raw_read_only(segment)?, bytes)
    }

    /// Address of the segment in this process, for registration with a device. Nothing may be read through it that
    /// another process writes meanwhile.
    pub fn base_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    fn keep(map: MmapRaw, bytes: usize) -> io::Result<Self> {
        // X3a, X28: a forked child must neither hold pinned pages by copy-on-write nor write a segment it does not own.
        map.advise(Advice::DontFork)?;
        let base = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            base,
            bytes,
            map: Arc::new(map),
        })
    }

    /// Address of the `size`-byte word at `at`.
    #[inline(always)]
    fn word(&self, at: usize, size: usize) -> *mut u8 {
        assert!(
            at.is_multiple_of(size) && at <= self.bytes - size,
            "word at {at} of {} bytes",
            self.bytes
        );
        // SAFETY: `at + size <= bytes` (asserted; `bytes` is at least 8), all of it inside the mapping.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Address of the `len` bytes at `at`.
    #[inline(always)]
    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(
            len <= self.bytes && at <= self.bytes - len,
            "{len} bytes at {at} of {} bytes",
            self.bytes
        );
        // SAFETY: `at + len <= bytes` (asserted), so the result lies in the mapping or one past its end.
        unsafe { self.base.as_ptr().add(at) }
    }

    #[inline(always)]
    fn atomic(&self, at: usize) -> &AtomicU64 {
        // SAFETY: an aligned word inside the mapping, which lives as long as `self`; all concurrent accesses to it are
        // atomic and of this size (X2). On a read-only mapping only loads are made: relaxed ones, which std promises
        // to be plain loads there (X2a).
        unsafe { &*self.word(at, 8).cast::<AtomicU64>() }
    }

    /// The futex counter at `at`. On a read-only mapping nothing but relaxed loads and futex calls may be made on it.
    #[inline(always)]
    pub(crate) fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `atomic`; a futex counter is never accessed as part of a 64-bit word (X29).
        unsafe { &*self.word(at, 4).cast::<AtomicU32>() }
    }
}

impl Shared for Mapping {
    fn size(&self) -> usize {
        self.bytes
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.atomic(at).load(Ordering::Relaxed)
    }

    #[cfg(kvsluice_tsan)]
    fn load_acquire(&self, at: usize) -> u64 {
        // X2a: ThreadSanitizer does not understand fences.
        // pairs with: MappingMut::store_release of the same word.
        self.atomic(at).load(Ordering::Acquire)
    }

    #[inline]
    fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and faults nowhere, whatever its address is.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().wrapping_add(at).cast()) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    #[inline]
    fn load_u32(&self, at: usize) -> u32 {
        self.atomic_u32(at).load(Ordering::Relaxed)
    }

    fn copy_out(&self, at: usize, into: &mut [u64]) {
        assert!(at.is_multiple_of(8), "words at {at}");
        let words = self.range(at, size_of_val(into)).cast::<AtomicU64>();
        for (i, word) in into.iter_mut().enumerate() {
            // SAFETY: word i lies in the range checked above and is aligned; as in `atomic`.
            *word = unsafe { &*words.add(i) }.load(Ordering::Relaxed);
        }
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        let from = self.range(at, into.len());
        // SAFETY: the range lies in the mapping and cannot overlap a private slice. No process writes it meanwhile by
        // the trait's contract; a hostile one that does can only change which bytes the private copy holds, and that
        // copy is what gets verified (X2).
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }
}

/// A segment that this process owns (X1), mapped for reading and writing. Clones share one mapping.
#[derive(Clone)]
pub struct MappingMut {
    segment: Mapping,
}

impl MappingMut {
    /// Maps the first `bytes` bytes of `segment` for reading and writing.
    ///
    /// # Errors
    /// As [`Mapping::read_only`]; `PermissionDenied` where the segment is sealed against writers (hardened mode).
    pub fn writable(segment: &OwnedFd, bytes: usize) -> io::Result<Self> {
        check_length(segment, bytes)?;
        let segment = Mapping::keep(MmapOptions::new().len(bytes).map_raw(segment)?, bytes)?;
        Ok(Self { segment })
    }

    /// Address of the segment in this process, for registration with a device and for scattered copies.
    pub fn base_mut_ptr(&self) -> *mut u8 {
        self.segment.base.as_ptr()
    }

    /// The same mapping, for code that only reads.
    pub fn reader(&self) -> &Mapping {
        &self.segment
    }

    /// Makes the pages of a range present and writable, without changing their bytes.
    pub(crate) fn populate(&self, at: usize, len: usize) -> io::Result<()> {
        self.segment.map.advise_range(Advice::PopulateWrite, at, len)
    }
}

impl Shared for MappingMut {
    fn size(&self) -> usize {
        self.segment.size()
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.segment.load(at)
    }

    #[inline]
    fn load_acquire(&self, at: usize) -> u64 {
        // pairs with: MappingMut::store_release of the same word.
        self.segment.load_acquire(at)
    }

    #[inline]
    fn load_u32(&self, at: usize) -> u32 {
        self.segment.load_u32(at)
    }

    fn copy_out(&self, at: usize, into: &mut [u64]) {
        self.segment.copy_out(at, into);
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.segment.bytes_out(at, into);
    }
}

impl SharedMut for MappingMut {
    #[inline]
    fn store(&self, at: usize, word: u64) {
        death::store();
        self.segment.atomic(at).store(word, Ordering::Relaxed);
    }

    #[inline]
    fn store_release(&self, at: usize, word: u64) {
        death::store();
        // pairs with: Shared::load_acquire of the same word.
        self.segment.atomic(at).store(word, Ordering::Release);
    }

    #[inline]
    fn prefetch_write(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            let line = self.segment.base.as_ptr().wrapping_add(at);
            // The intrinsic becomes a plain prefetch for processors that do not promise this instruction; every x86-64
            // decodes it, as a no-op where it means nothing.
            // SAFETY: a prefetch writes nothing and faults nowhere, whatever its address is.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    #[inline]
    fn store_u32(&self, at: usize, word: u32) {
        death::store();
        self.segment.atomic_u32(at).store(word, Ordering::Relaxed);
    }

    fn copy_in(&self, at: usize, words: &[u64]) {
        assert!(at.is_multiple_of(8), "words at {at}");
        let into = self.segment.range(at, size_of_val(words)).cast::<AtomicU64>();
        for (i, word) in words.iter().enumerate() {
            death::store();
            // SAFETY: word i lies in the range checked above and is aligned; as in `Mapping::atomic`.
            unsafe { &*into.add(i) }.store(*word, Ordering::Relaxed);
        }
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        let into = self.segment.range(at, bytes.len());
        for piece in death::pieces(bytes.len()) {
            death::store();
            // SAFETY: the pieces lie in both ranges. That of the mapping is writable and cannot overlap a private slice.
            // No process reads it meanwhile by the trait's contract; one that does can only confuse itself.
            unsafe {
                let from = bytes.as_ptr().add(piece.start);
                std::ptr::copy_nonoverlapping(from, into.add(piece.start), piece.len());
            }
        }
    }
}

fn check_length(segment: &OwnedFd, bytes: usize) -> io::Result<()> {
    let there = rustix::fs::fstat(segment.as_fd())?.st_size;
    if bytes < 8 || !bytes.is_multiple_of(8) || there < i64::try_from(bytes).unwrap_or(i64::MAX) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("cannot map {bytes} bytes of a segment of {there}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn segment(bytes: u64) -> OwnedFd {
        let segment = memfd_create("mapping", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&segment, bytes).unwrap();
        segment
    }

    #[test]
    fn x2_x2a_words_and_bytes_cross_between_two_mappings_of_one_segment() {
        let segment = segment(8192);
        let writer = MappingMut::writable(&segment, 8192).unwrap();
        let reader = Mapping::read_only(&segment, 8192).unwrap();
        assert_eq!(reader.size(), 8192);

        writer.copy_in(4096, &[1, 2, 3]);
        writer.store(4120, 4);
        writer.store_release(8184, 5);
        writer.store_u32(68, 6);
        writer.bytes_in(101, b"block");

        let mut words = [0; 4];
        reader.copy_out(4096, &mut words);
        assert_eq!(words, [1, 2, 3, 4]);
        assert_eq!(
            (reader.load_acquire(8184), reader.load_u32(68), reader.load_u32(64)),
            (5, 6, 0)
        );
        let mut bytes = [0; 5];
        reader.bytes_out(101, &mut bytes);
        assert_eq!(&bytes, b"block");
        assert_eq!(writer.clone().load(4096), 1);
    }

    #[test]
    fn x2_an_offset_outside_the_segment_panics_instead_of_reading_on() {
        let segment = segment(4096);
        let map = MappingMut::writable(&segment, 4096).unwrap();
        let outside = |access: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).expect_err("an access outside passed");
        };
        outside(&|| _ = map.load(4096));
        outside(&|| _ = map.load(4));
        outside(&|| _ = map.load(usize::MAX - 7));
        outside(&|| _ = map.load_u32(4096));
        outside(&|| map.copy_out(4088, &mut [0; 2]));
        outside(&|| map.copy_in(4, &[0]));
        outside(&|| map.bytes_out(4000, &mut [0; 97]));
        outside(&|| map.bytes_in(usize::MAX, &[0; 2]));
        map.bytes_out(4096, &mut []);
    }

    #[test]
    fn x30_a_mapping_longer_than_its_segment_is_refused() {
        let segment = segment(4096);
        let said = Mapping::read_only(&segment, 8192).err().unwrap().to_string();
        assert_eq!(said, "cannot map 8192 bytes of a segment of 4096");
        assert!(MappingMut::writable(&segment, 8192).is_err());
        assert!(Mapping::read_only(&segment, 0).is_err());
        assert!(Mapping::read_only(&segment, 12).is_err());
    }

    #[test]
    fn x3a_a_segment_is_not_inherited_by_fork() {
        let segment = segment(4096);
        let map = Mapping::read_only(&segment, 4096).unwrap();
        let wanted = format!("{:x}-", map.base_ptr() as usize);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&wanted));
        assert!(lines.next().is_some());
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }
}
