#!/usr/bin/env bash
# The speed of the message mode against NCCL's (collective_message_bench.cpp), on two GPUs: `bench` lines; status 1 where
# the members did not agree on messages.
# Usage: collective_messages.sh BUILD [collective_message_bench's options]
build=${1:?usage: collective_messages.sh BUILD}
shift
here=$(dirname "$0")
[ -x "$build/bench/collective_message_bench" ] || { echo "skipped: collective_message_bench was not built: NCCL was not found"; exit 77; }
said=$(mktemp)
trap 'rm -f "$said"' EXIT
bash "$here/two_ranks.sh" torchrun env LD_PRELOAD="$(realpath "$build/libforkpoint.so")" FORKPOINT_DETERMINISTIC=collectives \
  FORKPOINT_TEST_COLLECTIVES=messages "$build/bench/collective_message_bench" "$@" 2>"$said"
status=$?
cat "$said" >&2
if grep -qE 'left to NCCL|a reduction fails' "$said"; then exit 1; fi
exit "$status"
