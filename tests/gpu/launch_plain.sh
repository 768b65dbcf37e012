#!/usr/bin/env bash
# Records launch_plain and launch_plain_graphs at level launch, twice each, and checks that they notice nothing, that each
# launch is there with the memory that it was handed, that what cannot be seen is declared, and that the two runs are
# identical.
# Usage: launch_plain.sh BUILD
set -uo pipefail
build=$(cd "${1:?usage: launch_plain.sh BUILD}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0
fail() {
  echo "FAIL $*"
  failures=$((failures + 1))
}

record() {  # record NAME PROGRAM ARGUMENTS...: a run with one step
  local name=$1
  shift
  timeout 120 "$build/forkpoint" record --level launch --step-on mark_step -o "$folder/$name" -- "$build/tests/$@" \
    >"$folder/$name.out" 2>"$folder/$name.err"
}

check_program() {  # check_program PROGRAM
  local program=$1 run
  timeout 120 "$build/tests/$program" >"$folder/plain.out" 2>"$folder/plain.err" ||
    { fail "$program does not run unrecorded: $(cat "$folder/plain.err")"; return; }
  for run in a b; do
    record "$program-$run" "$program" || fail "$program recorded: status $?: $(cat "$folder/$program-$run.err")"
    diff "$folder/plain.out" "$folder/$program-$run.out" >"$folder/difference" ||
      fail "$program prints something else when it is recorded: $(head -n 20 "$folder/difference")"
  done
  "$build/forkpoint" show "$folder/$program-a" --launches 0 --json >"$folder/$program.json" ||
    fail "show --launches 0 of $program: status $?"
  python3 "$here/launch_plain_check.py" "$folder/$program.json" "$folder/plain.out" ||
    { fail "$program: see above"; cat "$folder/$program-a.err"; }
  "$build/forkpoint" diff "$folder/$program-a" "$folder/$program-b" >"$folder/verdict" ||
    fail "$program twice is not identical: $(cat "$folder/verdict")"
}

# Each way alone, so that one that goes wrong is named.
check_parts() {  # check_parts PROGRAM PART...
  local program=$1 part
  shift
  for part in "$@"; do
    timeout 120 "$build/tests/$program" "$part" >"$folder/plain.out" 2>&1
    record "$program-$part" "$program" "$part" ||
      fail "$program $part recorded: status $?: $(cat "$folder/$program-$part.err")"
    cmp -s "$folder/plain.out" "$folder/$program-$part.out" ||
      fail "$program $part prints something else when it is recorded"
  done
}

check_program launch_plain
check_program launch_plain_graphs
check_parts launch_plain tma cooperative large managed
check_parts launch_plain_graphs captured child built while if
[ "$failures" -eq 0 ] && echo "launch_plain and launch_plain_graphs: recorded as they ran"
exit $((failures != 0))
