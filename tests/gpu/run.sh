#!/usr/bin/env bash
# Everything that needs a GPU, in one script: configures, builds, runs the GPU tests and benches.
# Usage: tests/gpu/run.sh [STAGE...]
# STAGE: build | tests | bench | faults | overhead | launch | two-gpus | spike | readme | megatron | launch-overhead | growth | layer-overhead | collectives | torch-kernels (default: all)
# Ends with a table of bench lines and results, then `N passed, N failed, N skipped`. Each stage takes under 8 minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build-gpu}
stages=${*:-build tests bench faults overhead launch two-gpus spike readme megatron launch-overhead growth layer-overhead collectives torch-kernels}
out=${OUT:-$build/gpu-results}
mkdir -p "$build" "$out"
benches=$out/bench.txt
results=$out/results.txt
: >"$benches"
: >"$results"

result() { printf '%-7s %s\n' "$1" "$2" | tee -a "$results"; }  # result passed|failed|skipped WHAT

run_stage_build() {
  cmake -G Ninja -S . -B "$build" -DFORKPOINT_CUDA=ON >"$out/configure.log" 2>&1 &&
    cmake --build "$build" -- -k 0 >"$out/build.log" 2>&1 && result passed "build" && return
  grep -hE "(error|FAILED|Error)" "$out/configure.log" "$out/build.log" | head -n 40
  result failed "build"
  return 1
}

run_ctest() {  # run_ctest ARGUMENTS...: one result line a test
  ctest --test-dir "$build" --output-on-failure "$@" 2>&1 | tee "$out/ctest-$stage.log" |
    sed -nE '/^[0-9]+\/|Test +#|^ *[0-9]+\/[0-9]+ /p; /skipped: /p; /ERROR|CHECK|REQUIRE|values/p' | head -n 80
  while read -r name verdict; do
    case $verdict in
      Passed) result passed "$name" ;;
      Skipped) result skipped "$name" ;;
      *) result failed "$name" ;;
    esac
  done < <(sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: +([^ ]+) \.*[* ]*(Passed|Skipped|Failed|Timeout|Not Run|Exception|Subprocess aborted).*/\1 \2/p' "$out/ctest-$stage.log")
}

run_stage_tests() { run_ctest -L gpu -E 'planted_faults|^launch_plain$|^deterministic_collectives_test$'; }
run_stage_faults() { run_ctest -R planted_faults; }

run_bench() {  # run_bench NAME COMMAND...
  local name=$1 code
  shift
  "$@" 2>&1 | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  grep '^bench ' "$out/$name.log" >>"$benches"
  case $code in
    0) result passed "$name" ;;
    77) result skipped "$name" ;;
    *) result failed "$name" ;;
  esac
}

run_stage_bench() {
  run_bench probe_bench "$build/bench/probe_bench"
  run_bench device_digest_bench "$build/bench/device_digest_bench"
  run_bench hash_tensor_bench python3 tests/gpu/hash_tensor_bench.py "$build"
}
# Cases of which each prints a line `pass|FAIL|skip NAME: ...`.
run_cases() {  # run_cases NAME COMMAND...
  local name=$1 verdict case
  shift
  "$@" 2>&1 | tee "$out/$name.log"
  grep -qE '^[0-9]+ passed, ' "$out/$name.log" || result failed "$name (did not come to its end)"
  while read -r verdict case _; do
    case $verdict in
      pass) result passed "${case%:}" ;;
      skip) result skipped "${case%:}" ;;
      *) result failed "${case%:}" ;;
    esac
  done < <(grep -E '^(pass|FAIL|skip) ' "$out/$name.log")
}

run_stage_launch() {
  run_bench launch_plain bash tests/gpu/need_gpus.sh 1 bash tests/gpu/launch_plain.sh "$build"
  run_cases launch_cases python3 tests/torch/launch_cases.py "$build" --time-limit 400
  run_cases torch_graphs python3 tests/gpu/torch_graphs.py "$build"
}
run_stage_two-gpus() {  # what they need and is not here is skipped, case by case
  run_cases two_gpus python3 tests/gpu/two_gpus.py "$build" --time-limit 240
  run_cases multi_gpu_cases python3 tests/torch/multi_gpu_cases.py "$build" --time-limit 200
}
# From attach by replay to the launch, on a DDP job; and what `doctor` says of this machine, to be read.
run_stage_spike() {
  FORKPOINT_BUILD=$(realpath "$build") run_bench spike bash tests/gpu/need_gpus.sh 2 python3 tests/torch/spike_test.py
  "$build/forkpoint" doctor 2>&1 | tee "$out/doctor.log"
}
run_stage_readme() {
  FORKPOINT_BUILD=$(realpath "$build") run_bench readme bash tests/gpu/need_gpus.sh 2 python3 tests/torch/readme_test.py two-gpus
}
run_stage_megatron() { run_cases megatron_cases python3 tests/gpu/megatron_cases.py "$build" --time-limit 300; }
run_stage_collectives() {  # what needs two GPUs is skipped where there is one
  run_bench deterministic_collectives_test "$build/tests/deterministic_collectives_test"
  run_bench collective_bench "$build/bench/collective_bench" --json "$out/collectives.json"
  run_bench collective_bench_graphs "$build/bench/collective_bench" --graphs --largest $((1 << 20)) --json "$out/collectives-graphs.json"
  run_bench collective_messages bash tests/gpu/need_gpus.sh 2 bash tests/gpu/collective_messages.sh "$build"
  run_cases collective_cases python3 tests/gpu/collective_cases.py "$build" --time-limit 200
}
run_stage_launch-overhead() {
  run_bench launch_overhead python3 tests/gpu/launch_overhead.py "$build" --rounds 2 --only start,eager,debug_mode,graph
}
run_stage_growth() { run_bench growth python3 tests/gpu/launch_overhead.py "$build" --only growth; }
run_stage_layer-overhead() { run_bench layer_overhead python3 tests/gpu/layer_overhead.py "$build" --rounds 2; }
run_stage_torch-kernels() {
  run_cases torch_kernels python3 tests/gpu/torch_kernels.py "$build" --json "$out/torch_kernels.json"
  grep '^bench ' "$out/torch_kernels.log" >>"$benches"
}
run_stage_overhead() { run_bench recording_overhead python3 tests/gpu/overhead.py "$build"; }

for stage in $stages; do
  echo "== $stage"
  "run_stage_$stage" || { [ "$stage" = build ] && break; }  # nothing can run then
done

echo
cat "$benches"
cat "$results"
count() { grep -c "^$1 " "$results"; }
echo "$(count passed) passed, $(count failed) failed, $(count skipped) skipped"
[ "$(count failed)" -eq 0 ]
