#!/bin/sh
# The ring, the terminal slots and the wake-up under loom (X34). Two minutes of one core to build, a second to run; the
# panics that it shows are those of the planted faults.
set -eu
cd "$(dirname "$0")/../.."
# Beside the other builds: loom's atomics change every crate.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" RUSTFLAGS="--cfg loom ${RUSTFLAGS:-}" RUST_BACKTRACE=0
exec cargo test --release --lib -p kvsluice-transport loom_ -- --nocapture --test-threads 1
