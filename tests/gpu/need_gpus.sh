#!/usr/bin/env bash
# need_gpus.sh N COMMAND...: runs COMMAND where at least N GPUs are there, else says so and exits with 77 (skipped).
need=$1
shift
found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
if [ "${found:-0}" -lt "$need" ]; then
  echo "skipped: needs $need GPU(s), found ${found:-0}"
  exit 77
fi
exec "$@"
