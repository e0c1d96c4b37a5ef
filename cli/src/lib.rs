//! The `kvsluice` binary: arguments, wiring, printing. It decides nothing.

pub mod sim;
