//! Whole-system tests of kvsluice: real processes, crashes, hostile peers; and the board of its rules.

pub mod rules;
