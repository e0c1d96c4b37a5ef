#!/bin/sh
# The ring, the terminal slots and the wake-up under loom (X34). About a minute, after the build.
set -eu
cd "$(dirname "$0")/../.."
RUSTFLAGS="--cfg loom ${RUSTFLAGS:-}" exec cargo test --release --lib -p kvsluice-transport loom_ -- --nocapture --test-threads 1
