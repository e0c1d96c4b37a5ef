#!/bin/sh
# Fuzzes every decoder with libFuzzer (X33). Usage: tests/scripts/fuzz.sh [inputs per target, 10000000] [target ...]
# Needs: cargo install cargo-fuzz, and a nightly toolchain. No sanitizer: what is fuzzed has no unsafe code of its own,
# and is ten times as fast. Debug assertions and overflow checks are on. Ends at the first crash; the input is kept.
set -eu
cd "$(dirname "$0")/../.."
runs=${1:-10000000}
[ $# -eq 0 ] || shift
[ $# -ne 0 ] || set -- plan port geometry store control answers texts lines race journal
corpus=tests/fuzz/corpus
mkdir -p "$corpus"

# The golden records, behind what the target reads first; see tests/tests/decoders.rs.
records() {
    for golden in layout/golden/*.hex; do
        { printf "$1"; tr -d ' \n' <"$golden" | xxd -r -p; } >"$2/golden-$(basename "$golden" .hex)"
    done
}
seeds() {
    case $1 in
    plan) records '' "$2" ;;
    port) records '\377\000\000' "$2" ;;
    journal) records '\060\377\000\000\000\000' "$2" ;;
    race) records '\377\377' "$2" ;;
    texts) cp tests/fuzz/seeds/texts/* "$2" ;;
    lines)
        domain=0
        for name in validate select plan retain ledger; do
            number=0
            # Of each vector its questions, one a line.
            while IFS= read -r vector; do
                questions=$(printf '%s\n' "$vector" | sed 's/"in": /\n/g' | sed -n 's/, "out":.*//p')
                printf "\\00$domain%s" "$questions" >"$2/$name-$number"
                number=$((number + 1))
            done <"cpu_worker/vectors/$name.jsonl"
            domain=$((domain + 1))
        done
        ;;
    esac
}

echo "| target | executions | seconds | coverage | features | crashes |"
echo "| --- | --- | --- | --- | --- | --- |"
for target in "$@"; do
    mkdir -p "$corpus/$target"
    seeds "$target" "$corpus/$target"
    log=$corpus/$target.log
    begin=$(date +%s)
    cargo +nightly fuzz run --fuzz-dir tests/fuzz --sanitizer none "$target" -- \
        -runs="$runs" -max_len=1024 -len_control=0 -print_final_stats=1 >"$log" 2>&1 || {
        grep -A3 panicked "$log" || tail -20 "$log"
        exit 1
    }
    done=$(sed -n 's/^#[0-9]*\tDONE *cov: \([0-9]*\) ft: \([0-9]*\).*/\1 | \2/p' "$log")
    executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "| $target | $executed | $(($(date +%s) - begin)) | $done | 0 |"
done
