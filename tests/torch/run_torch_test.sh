#!/usr/bin/env bash
# Runs a Python test with the python that install.sh names. Skips (status 77, and a line says why) where there is none.
# Usage: tests/torch/run_torch_test.sh --install [PACKAGE...]         fetches what is missing; the other form never does
#        tests/torch/run_torch_test.sh [--with PACKAGE]... SCRIPT [ARGUMENT...]
# The test finds the build folder in FORKPOINT_BUILD, and torch.distributed keeps to the loopback interface.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# install.sh says in its last line on stderr why there is no python; the first ones may tell of a download.
find_python() {
  local said status
  said=$(mktemp)
  python=$("$here/install.sh" "$@" 2>"$said")
  status=$?
  cat "$said" >&2
  [ $status -ne 77 ] || echo "skipped: $(tail -1 "$said")"
  rm -f "$said"
  [ $status -eq 0 ] || exit $status
}

if [ "${1:-}" = --install ]; then
  shift
  find_python "$@"
  echo "$python"
  exit 0
fi

packages=()
while [ "${1:-}" = --with ]; do packages+=("$2"); shift 2; done
[ $# -gt 0 ] || { echo "usage: run_torch_test.sh [--with PACKAGE]... SCRIPT [ARGUMENT...]" >&2; exit 1; }
: "${FORKPOINT_BUILD:?must name the build folder}"
find_python --cached "${packages[@]}"

# The name of this machine need not resolve, and threads of BLAS in each of several ranks only get in each other's way.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$FORKPOINT_BUILD/tests/inductor
exec "$python" "$@"
