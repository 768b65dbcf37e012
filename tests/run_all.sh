#!/usr/bin/env bash
# Runs every test of a build folder that this machine can run; names the skipped ones and why. Usage: tests/run_all.sh BUILD
# Tests of many PyTorch programs (label slow) take minutes each: FORKPOINT_SLOW_TESTS=1 runs them too. Without it they are named.
set -uo pipefail
build=${1:?usage: tests/run_all.sh BUILD}
log=$build/Testing/junit.xml
mkdir -p "$build/Testing"

without=()
[ "${FORKPOINT_SLOW_TESTS:-0}" = 1 ] || without=(-LE '^slow$')
ctest --test-dir "$build" "${without[@]}" --output-on-failure --output-junit "$PWD/$log" -j "$(nproc)"
status=$?

# A test that skips itself says why in a line "skipped: ..."; CTest keeps it in the log only. One that could not be started at
# all is no skip: it failed.
awk '
  /<testcase / { name = $0; sub(/.*<testcase name="/, "", name); sub(/".*/, "", name) }
  /skipped: /  { reason = $0; sub(/.*skipped: /, "", reason); sub(/<.*/, "", reason); why[name] = reason }
  /<skipped message="SKIP_RETURN_CODE/ { skipped[name] = 1 }
  /<skipped /  { if (!(name in skipped)) print "not started " name }
  END { for (name in skipped) printf "skipped %s: %s\n", name, (name in why) ? why[name] : "(no reason given)" }
' "$log" | sort
skipped=$(grep -c '<skipped message="SKIP_RETURN_CODE' "$log")
passed=$(grep -c 'status="run"' "$log")
failed=$(($(grep -c '<testcase ' "$log") - passed - skipped))
if [ ${#without[@]} -gt 0 ]; then
  ctest --test-dir "$build" -N -L '^slow$' -FA '.*' | sed -nE 's/^ *Test +#[0-9]+: (.*)/not run (FORKPOINT_SLOW_TESTS=1 runs it): \1/p'
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$skipped" -eq 0 ] || echo "(skipped tests are not counted as passed)" >&2
exit "$status"
