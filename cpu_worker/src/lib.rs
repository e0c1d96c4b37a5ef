//! Who decides what moves: selector, planner, ledger, retention, host store, and the producer process.
