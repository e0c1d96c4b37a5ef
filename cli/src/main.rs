//! The `kvsluice` binary.
fn main() {}
