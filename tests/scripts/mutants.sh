#!/bin/sh
# `cargo mutants` on the decision modules: what survives is argued in docs/mutants.md. The modules are copied into a crate
# that holds nothing else, so that a mutant costs seconds; the random rounds and the vectors look only at what the unit
# tests let through.
# Needs: cargo install cargo-mutants --locked
# Use: tests/scripts/mutants.sh OUTPUT_FOLDER [file ...]   (names without .rs; all decision modules when none is given)
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
shift
decisions="block_set cost diff_plan invariants ledger owner planner rank_set residency retain retain_steps selection selector table whole_blocks"
mkdir -p "$out"
out=$(cd "$out" && pwd)
cut=$out/cut

rm -rf "$cut"
mkdir -p "$cut/cpu_worker/src"
cp -r "$root/layout" "$root/Cargo.lock" "$cut/"
sed -E 's/^members = .*/members = ["layout", "cpu_worker"]/; /^default-members/d; /^kvsluice-(transport|gpu|cli)/d; /kvsluice-cpu-worker/d' \
    "$root/Cargo.toml" >"$cut/Cargo.toml"
sed '/^kvsluice-transport/d' "$root/cpu_worker/Cargo.toml" >"$cut/cpu_worker/Cargo.toml"
cp -r "$root/cpu_worker/tests" "$cut/cpu_worker/"
for module in $decisions eval; do
    cp "$root/cpu_worker/src/$module.rs" "$cut/cpu_worker/src/"
    [ ! -d "$root/cpu_worker/src/$module" ] || cp -r "$root/cpu_worker/src/$module" "$cut/cpu_worker/src/"
    echo "pub mod $module;"
done >"$cut/cpu_worker/src/lib.rs"

files=
for module in ${*:-$decisions}; do
    files="$files -f cpu_worker/src/$module.rs -f cpu_worker/src/$module/*.rs"
done
export CARGO_TARGET_DIR="$out/target" CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=1
mutants() {
    # shellcheck disable=SC2086 # one word per file
    (cd "$cut" && set -f && cargo mutants --in-place --package kvsluice-cpu-worker $files -o "$out" --no-shuffle --colors never "$@") || [ $? -le 3 ]
}
mutants --timeout 20 -- --lib
mutants --iterate --timeout 300 -- --lib --test rounds --test vectors
