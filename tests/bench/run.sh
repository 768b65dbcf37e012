#!/usr/bin/env bash
# Runs the benches that this machine can run and prints, last, one line each: bench NAME VALUE GOAL ok|miss.
# Usage: tests/bench/run.sh BUILD
set -uo pipefail
build=${1:?usage: tests/bench/run.sh BUILD}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
status=0
for program in "$build"/bench/*_bench; do
  echo "== ${program##*/}"
  "$program" | tee >(grep '^bench ' >>"$lines")
  code=${PIPESTATUS[0]}
  case $code in
    0) ;;
    77) echo "   (skipped: see above)" ;;
    *) echo "   ${program##*/} exited with status $code"; status=1 ;;
  esac
done
echo
sleep 0.2
cat "$lines"
exit "$status"
