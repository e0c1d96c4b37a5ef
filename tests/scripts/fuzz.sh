#!/bin/sh
# Fuzzes the decoders with libFuzzer (X33). Usage: tests/scripts/fuzz.sh [seconds per target, 240]
# Needs: cargo install cargo-fuzz. No sanitizer: what is fuzzed has no unsafe code of its own, and is ten times as fast.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-240}
for target in plan port; do
    cargo +nightly fuzz run --fuzz-dir tests/fuzz --sanitizer none "$target" -- \
        -max_total_time="$seconds" -max_len=4096 -len_control=0 -print_final_stats=1
done
