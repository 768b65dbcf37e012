#!/usr/bin/env bash
# The whole path on the CPU: train twice, once with one flipped bit, and let forkpoint say where the runs fork.
# Usage: samples/demo.sh BUILD
set -euo pipefail
build=${1:?usage: samples/demo.sh BUILD}
runs=$build/demo
rm -rf "$runs"
mkdir -p "$runs"

train() {  # train NAME [options]: a recorded run of minigpt, 4 ranks on the CPU
  local name=$1
  shift
  "$build/forkpoint" record --level layer -o "$runs/$name" -- \
    "$build/samples/minigpt" --device cpu --ranks 4 --steps 12 --seed 1 "$@" >"$runs/$name.log" 2>&1 ||
    { cat "$runs/$name.log"; exit 1; }
  tail -n 1 "$runs/$name.log"
}

echo "1. a clean run of minigpt, 4 ranks, 12 steps"
train clean
echo "2. the same, with one bit of one gradient flipped on rank 2 at step 7"
train flipped --fault bitflip@step=7,rank=2,layer=3,target=grad
echo "3. forkpoint diff"
echo
status=0
"$build/forkpoint" diff "$runs/clean" "$runs/flipped" --html "$runs/report.html" || status=$?
[ "$status" -eq 1 ] || { echo "demo: diff exited with status $status, but the runs differ: 1 was expected" >&2; exit 1; }
echo
echo "The report: $runs/report.html"
