//! The `kvsluice` binary from end to end, as its users start it: real processes, killed and interrupted.

#[cfg(test)]
mod adoption;
#[cfg(test)]
mod eval;
#[cfg(test)]
mod losses;
#[cfg(test)]
mod namespaces;
#[cfg(test)]
mod pair;
#[cfg(test)]
mod persistent;
#[cfg(test)]
mod running;
#[cfg(test)]
mod sides;
#[cfg(test)]
mod usage;

/// The binary under test.
#[cfg(test)]
const BINARY: &str = env!("CARGO_BIN_EXE_kvsluice-under-test");
