//! Anonymous segments: nothing of them remains once the last process that holds them is gone (X21, X27).

use std::io;
use std::os::fd::OwnedFd;

use kvsluice_layout::segment::SegmentKind;
use rustix::fs::{MemfdFlags, Mode as Bits, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use super::{Backend, HugePages, Identity, Mode};

/// Seals that fix the size: a peer that truncates would end the others with SIGBUS.
pub(super) const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The back ends *memfd* and *hardened*.
#[derive(Clone, Copy, Debug)]
pub struct Memfd {
    /// Also seal what the producer writes against every later writable mapping.
    pub hardened: bool,
}

impl Backend for Memfd {
    fn mode(&self) -> Mode {
        if self.hardened { Mode::Hardened } else { Mode::Memfd }
    }

    fn create(&self, segment: SegmentKind, huge: Option<HugePages>) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC
            | MemfdFlags::ALLOW_SEALING
            | match huge {
                None => MemfdFlags::empty(),
                Some(HugePages::TwoMiB) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
                Some(HugePages::OneGiB) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            };
        let name = format!("kvsluice {segment}");
        // Some hosts only allow segments that can never be executed; kernels before 6.3 do not know the flag.
        let created = match memfd_create(&name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create(&name, flags)?,
            created => created?,
        };
        fchmod(&created, Bits::RUSR | Bits::WUSR)?;
        Ok(created)
    }

    fn seal(&self, segment: SegmentKind, descriptor: &OwnedFd) -> io::Result<()> {
        let seals = if self.mode().seals_writes(segment) {
            SIZE_SEALS | SealFlags::FUTURE_WRITE
        } else {
            SIZE_SEALS
        };
        Ok(fcntl_add_seals(descriptor, seals)?)
    }

    fn discard(&self, _segment: SegmentKind, _identity: Identity) -> io::Result<()> {
        Ok(())
    }
}
