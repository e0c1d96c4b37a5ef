#!/bin/sh
# The protocol on the heap and on mapped segments under ThreadSanitizer (X34), and two planted orderings that it must find.
# ThreadSanitizer does not understand fences: cfg kvsluice_tsan turns the acquiring ones into acquire loads (X2a).
# Needs: rustup component add --toolchain nightly rust-src
set -eu
cd "$(dirname "$0")/../.."
target=$(rustc +nightly -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Zsanitizer=thread --cfg kvsluice_tsan ${RUSTFLAGS:-}"
test() {
    cargo +nightly test -Zbuild-std --target "$target" -p kvsluice-transport --lib -- "$@" 2>&1
}

test proof:: producer:: port:: recovery:: segment:: wait::
for fault in x10_relaxed_commit x12_relaxed_terminal; do
    log=$(KVSLUICE_PLANTED=$fault test proof::threads) && {
        echo "$fault was not found"
        exit 1
    }
    echo "$log" | grep -qE "data race|proof::threads.*FAILED" || { echo "$log" | tail -20; exit 1; }
    echo "$fault: found"
done
