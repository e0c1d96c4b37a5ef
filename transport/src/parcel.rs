//! What is too long for a message: bytes in a sealed memory file, whose descriptor is sent instead.
//!
//! It is read with `pread` and never mapped, so its sender can neither change it meanwhile nor cause a SIGBUS.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{pread, pwrite};

/// Seals after which a memory file's size and bytes stay what they are.
const FIXED: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE)
    .union(SealFlags::SEAL);

/// Why a parcel is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ParcelError {
    /// It is not a sealed memory file, so it could change or block.
    #[error("a parcel has the seals {found}, expected {FIXED:?}")]
    NotSealed {
        /// What it has.
        found: String,
    },
    /// It is longer than the reader takes.
    #[error("a parcel has {found_bytes} bytes, at most {bytes_max} are taken")]
    TooLong {
        /// Its length.
        found_bytes: i64,
        /// The most that is taken.
        bytes_max: usize,
    },
    /// The system refused.
    #[error("cannot read a parcel: {0}")]
    System(#[from] io::Error),
}

/// Puts bytes into a parcel.
///
/// # Errors
/// The system's error: no memory, no descriptors.
pub fn pack(bytes: &[u8]) -> io::Result<OwnedFd> {
    let parcel = memfd_create("kvsluice parcel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        at += pwrite(&parcel, rest, at as u64)?;
    }
    fcntl_add_seals(&parcel, FIXED)?;
    Ok(parcel)
}

/// Takes the bytes out of a parcel that a peer sent, at most `bytes_max`.
///
/// # Errors
/// [`ParcelError`].
pub fn unpack(parcel: &OwnedFd, bytes_max: usize) -> Result<Vec<u8>, ParcelError> {
    // Only memory files have seals: whatever else a peer sends is refused here, before it could block a read.
    let found = fcntl_get_seals(parcel).unwrap_or(SealFlags::empty());
    if !found.contains(FIXED) {
        return Err(ParcelError::NotSealed {
            found: format!("{found:?}"),
        });
    }
    let found_bytes = fstat(parcel).map_err(io::Error::from)?.st_size;
    let length = usize::try_from(found_bytes).ok().filter(|length| *length <= bytes_max);
    let length = length.ok_or(ParcelError::TooLong { found_bytes, bytes_max })?;
    let mut bytes = vec![0; length];
    let mut at = 0;
    while let Some(rest) = bytes.get_mut(at..).filter(|rest| !rest.is_empty()) {
        match pread(parcel, rest, at as u64).map_err(io::Error::from)? {
            0 => return Err(ParcelError::System(io::ErrorKind::UnexpectedEof.into())),
            read => at += read,
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x25_a_parcel_arrives_whole_and_cannot_change() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let parcel = pack(&bytes).unwrap();
        assert_eq!(unpack(&parcel, bytes.len()).unwrap(), bytes);
        assert!(pwrite(&parcel, b"x", 0).is_err());
        assert!(unpack(&pack(b"").unwrap(), 0).unwrap().is_empty());
    }

    #[test]
    fn x33_what_is_no_parcel_is_refused() {
        let said = unpack(&pack(&[0; 9]).unwrap(), 8).unwrap_err().to_string();
        assert_eq!(said, "a parcel has 9 bytes, at most 8 are taken");
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let said = unpack(&open, 8).unwrap_err().to_string();
        assert_eq!(
            said,
            "a parcel has the seals SealFlags(0x0), expected SealFlags(SEAL | SHRINK | GROW | WRITE)"
        );
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert!(matches!(unpack(&pipe, 8), Err(ParcelError::NotSealed { .. })));
    }
}
