#!/bin/sh
# tests/under_load.sh [RUNS]: default runs beside busy loops, so that each core has four times its work.
# Fails at the first run that fails. A test that fails here and passes alone judges by the clock.
set -eu
cd "$(dirname "$0")/.."
loops=
trap 'kill $loops' EXIT
for _ in $(seq $((3 * $(nproc)))); do
    sh -c 'while :; do :; done' &
    loops="$loops $!"
done
for run in $(seq "${1:-20}"); do
    echo "run $run"
    make test ARGS=-q
done
