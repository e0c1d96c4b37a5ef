//! Who moves the blocks: device trait, host device, copy planner, tables, and the worker process.
