#!/usr/bin/env bash
# A shell, a build tool, a compiler, git and Python that inherit the preload must not notice it: same stdout, stderr and
# status, no run folder, no thread more. Tried dormant, and with a recording at level launch asked for. Needs no GPU.
# Usage: preload_tools.sh PROBE. A tool that is not installed is skipped.
set -uo pipefail
probe=$(realpath "${1:?usage: preload_tools.sh PROBE}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
passed=0 failed=0 skipped=0

# ---- What each tool is asked to do, as a script that runs in an empty folder.

bash_script='
echo out; echo err >&2
seq 5 | sort -r | tail -n 2
for status in 0 1 2; do (exit $status); echo "$status $?"; done
bash -c "kill -TERM \$\$"; echo "killed: $?"
exec 7<<<"from a descriptor"; cat <&7
(sleep 0.1 & wait); exit 3'

make_script='
printf "all: a b\na b:\n\t@echo made \$@ >\$@\n\t@cat \$@\nbroken:\n\t@echo fails >&2; exit 4\n" >Makefile
make -s all; make all; make -s -k broken; echo "status $?"
make -s -j2 -B all >/dev/null'

nvcc_script='
printf "__global__ void add(float* x) { x[threadIdx.x] += 1; }\nint main() { add<<<1, 32>>>(nullptr); }\n" >good.cu
printf "__global__ void add(float* x) { x[0] += y; }\n" >bad.cu
nvcc -arch=sm_90 -c good.cu -o good.o; echo "status $?"; [ -s good.o ] && echo made
nvcc -arch=sm_90 -c bad.cu -o bad.o; echo "status $?"; ls'

git_script='
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a
export GIT_AUTHOR_DATE="2020-01-01T00:00:00Z" GIT_COMMITTER_DATE="2020-01-01T00:00:00Z"
git -c init.defaultBranch=main init -q; echo text >file; git add file; git commit -q -m first; git log --stat
echo more >>file; git --no-pager diff; git status --short; git checkout -q nowhere; echo "status $?"'

python_script='
cat >script.py <<END
import os, subprocess, sys, threading
print("threads", [line.split()[1] for line in open("/proc/self/status") if line.startswith("Threads")])
thread = threading.Thread(target=print, args=("in a thread",)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)
sys.stdout.flush()
child = os.fork()
if child == 0: os._exit(9)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise SystemExit("gives up")
END
python3 script.py; echo "status $?"
cat >workers.py <<END
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, 2]))
END
python3 -W error workers.py
exit 5'

# ---- Running them

run_tool() {  # run_tool NAME SCRIPT VARIANT ENVIRONMENT...: leaves NAME.VARIANT.out, .err and .status
  local script=$2 result=$folder/$1.$3
  shift 3
  rm -rf "$folder/work" && mkdir "$folder/work"
  (cd "$folder/work" && env "$@" timeout 120 bash -c "$script") >"$result.out" 2>"$result.err" </dev/null
  echo $? >"$result.status"
}

check_tool() {  # check_tool NAME SCRIPT
  local name=$1 variant what problems=
  command -v "$name" >/dev/null || { echo "skip $name: not installed"; skipped=$((skipped + 1)); return; }
  run_tool "$name" "$2" plain A=1
  run_tool "$name" "$2" dormant "LD_PRELOAD=$probe"
  run_tool "$name" "$2" asked "LD_PRELOAD=$probe" "FORKPOINT_RUN=$folder/run" FORKPOINT_LEVEL=launch \
    FORKPOINT_STEP_ON=step
  for variant in dormant asked; do
    for what in out err status; do
      cmp -s "$folder/$name.plain.$what" "$folder/$name.$variant.$what" && continue
      problems="$problems $variant:$what"
      diff "$folder/$name.plain.$what" "$folder/$name.$variant.$what" | head -n 10
    done
  done
  [ -e "$folder/run" ] && problems="$problems left:$(ls "$folder/run" | tr '\n' ' ')"
  rm -rf "$folder/run"
  [ -s "$folder/$name.plain.out" ] || problems="$problems printed-nothing-at-all"
  if [ -z "$problems" ]; then
    echo "pass $name"
    passed=$((passed + 1))
  else
    echo "FAIL $name:$problems"
    failed=$((failed + 1))
  fi
}

check_tool bash "$bash_script"
check_tool make "$make_script"
check_tool nvcc "$nvcc_script"
check_tool git "$git_script"
check_tool python3 "$python_script"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
