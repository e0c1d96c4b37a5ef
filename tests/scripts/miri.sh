#!/bin/sh
# Records, leases and the protocol on the heap under Miri (X34), and two planted orderings that it must find: as a data
# race on a block, or as a record that is read before it is whole.
# Needs: rustup component add --toolchain nightly miri rust-src
set -eu
cd "$(dirname "$0")/../.."
export MIRIFLAGS="-Zmiri-env-forward=KVSLUICE_PLANTED ${MIRIFLAGS:-}"

cargo +nightly miri test -p kvsluice-layout --lib -- plan:: lease:: record:: ids::
cargo +nightly miri test -p kvsluice-transport --lib -- proof::threads proof::random port:: recovery::
for fault in x10_relaxed_commit x12_relaxed_terminal; do
    log=$(KVSLUICE_PLANTED=$fault cargo +nightly miri test -p kvsluice-transport --lib -- proof::threads 2>&1) && {
        echo "$fault was not found"
        exit 1
    }
    echo "$log" | grep -qE "Data race detected|proof::threads.*FAILED" || { echo "$log" | tail -20; exit 1; }
    echo "$fault: found"
done
