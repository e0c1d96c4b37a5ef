//! Whole-system tests of kvsluice: real processes, crashes, hostile peers.
