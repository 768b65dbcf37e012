#!/usr/bin/env bash
# Prints the path of a python that can `import torch` (2.11 or newer, with gloo) and `import numpy`; makes one
# where there is none.
#
# Usage: tests/torch/install.sh [--background | --cached] [PACKAGE...]
#   PACKAGE       what must be importable as well: lightning, transformers (with accelerate), megatron-core (with what
#                 its checkpoints want), or a package's own name
#   --background  prints nothing on stdout and comes back at once; what is missing is fetched meanwhile
#   --cached      fetches nothing
# Exit status: 0; 77 when it cannot be had (one sentence on stderr says why); 1 when it was called wrongly.
# FORKPOINT_TORCH_PYTHON: the python to use, whatever it holds; `none`: there is to be none (status 77).
#
# Taken in this order: the python3 of this machine if it has torch; a folder made before, in the user's cache; else that
# folder is made, from wheels, with the CUDA libraries of this machine's toolkit where it has them. No more is changed.
set -uo pipefail

torch=2.11.0
recipe=1  # of what is laid in the folder: raise it, and folders made before are made anew
cache=${XDG_CACHE_HOME:-$HOME/.cache}/forkpoint
say() { echo "torch for the tests: $*" >&2; }
unavailable() { say "$*"; exit 77; }

# Library that torch needs at import, the wheel that holds it (torch's own pins), and the wheel's size in MB.
libraries="
libcublas*.so.13     nvidia-cublas==13.1.0.3       423
libcudart.so.13      nvidia-cuda-runtime==13.0.96  2
libcupti.so.13       nvidia-cuda-cupti==13.0.85    11
libcudnn*.so.9       nvidia-cudnn-cu13==9.19.0.56  366
libcufft.so.12       nvidia-cufft==12.0.0.61       214
libcurand.so.10      nvidia-curand==10.4.0.35      60
libcusolver.so.12    nvidia-cusolver==12.0.4.66    201
libcusparse.so.12    nvidia-cusparse==12.6.3.3     146
libnccl.so.2         nvidia-nccl-cu13==2.28.9      197
libnvJitLink.so.13   nvidia-nvjitlink==13.0.88     41
libnvrtc*.so.13*     nvidia-cuda-nvrtc==13.0.88    90
libcusparseLt.so.0   nvidia-cusparselt-cu13==0.8.0 170
libnvshmem_host.so.3 nvidia-nvshmem-cu13==3.4.5    60
libcufile.so.0       nvidia-cufile==1.15.1.6       1
"
megabytes_of_torch=560  # torch itself, numpy and the pure-Python packages

# Versions on which the tests were written. Anything else is taken as it comes.
pinned() {
  case $1 in
    lightning) echo lightning==2.6.6 ;;
    transformers) echo transformers==5.23.0 accelerate==1.15.0 ;;
    megatron-core) echo megatron-core==0.19.2 packaging==26.4 psutil==7.2.2 ;;  # psutil: its checkpoints want it
    *) echo "$1" ;;
  esac
}

# "TAG PYTHON WORD": cp311, the interpreter itself (a shim may stand before it), and whether it has all that is wanted:
# yes, no (it has no torch), or the package that it lacks. Asks what is installed, as importing takes seconds.
# A folder named torch in the working directory must not be taken for the package, hence the cd.
ask_python3() {
  cd / && python3 - "$@" <<'PYTHON'
import importlib.metadata as metadata, importlib.util, re, sys

def has(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

version = [int(n) for n in re.findall(r"\d+", has("torch") or "0")[:2]]
word = "yes" if version >= [2, 11] and importlib.util.find_spec("torch") and has("numpy") else "no"
lacking = [name for name in sys.argv[1:] if not has(name)]
print(f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}", sys.executable.replace(" ", "\\ "),
      lacking[0] if word == "yes" and lacking else word)
PYTHON
}

# Whole, of this recipe, and its interpreter and the toolkit that it links to still exist.
is_whole() {
  [ -x "$1/bin/python" ] && grep -qsx "recipe $recipe" "$1/stamp" && { [ ! -L "$1/toolkit" ] || [ -e "$1/toolkit/." ]; }
}

# The library folder of a CUDA 13 toolkit of this machine, if any.
find_toolkit() {
  local nvcc home folder
  nvcc=$(command -v nvcc) && nvcc=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-13.0 "$nvcc"; do
    for folder in "$home"/lib64 "$home"/lib "$home/targets/$(uname -m)-linux/lib"; do
      [ -n "$home" ] && [ -e "$folder/libcudart.so.13" ] && { readlink -f "$folder"; return; }
    done
  done
}

# Splits the libraries: sets `wheels` and `megabytes` to what must be fetched, `patterns` to what toolkit $1
# (may be empty) has.
plan() {
  local pattern wheel size
  wheels=() patterns=() megabytes=$megabytes_of_torch
  while read -r pattern wheel size; do
    [ -n "$pattern" ] || continue
    if [ -n "$1" ] && compgen -G "$1/$pattern" >/dev/null; then
      patterns+=("$pattern")
    else
      wheels+=("$wheel")
      megabytes=$((megabytes + size))
    fi
  done <<<"$libraries"
}

# pip of folder $1; what it says goes to its log.
pip_in() {
  local folder=$1
  shift
  timeout --foreground 1500 "$folder/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-input \
    --retries 2 --progress-bar off "$@" >>"$folder/pip.log" 2>&1
}

last_error() {
  local line
  if grep -qsE 'NewConnectionError|Failed to establish|NameResolutionError' "$1/pip.log"; then
    echo "no package index is reached"
    return
  fi
  line=$(grep -s '^ERROR: ' "$1/pip.log" | tail -1)
  line=${line#ERROR: }
  echo "${line:-pip did not come to an end}"
}

# Fills the empty virtual environment $1 with torch; libraries come from toolkit $2, or all from wheels. False: failed.
lay_torch() {
  local site pattern file
  plan "$2"
  pip_in "$1" --no-deps "torch==$torch" "${wheels[@]}" || return 1
  site=$(echo "$1"/lib/python*/site-packages)
  # torch looks for its libraries in nvidia/cu13/lib (DT_RPATH) before LD_LIBRARY_PATH. Linked file by file: pip must
  # never come to write into the toolkit.
  mkdir -p "$site/nvidia/cu13/lib"
  for pattern in "${patterns[@]}"; do
    for file in "$2"/$pattern; do ln -s "$file" "$site/nvidia/cu13/lib/"; done
  done
  [ ${#patterns[@]} -eq 0 ] || ln -s "$2" "$1/toolkit"
  # The libraries are there, and triton is of no use without a GPU: nothing that needs torch may make pip fetch them.
  sed -i -E '/^Requires-Dist: (cuda-|nvidia-|triton)/d' "$site/torch-$torch.dist-info/METADATA"
  pip_in "$1" "torch==$torch" numpy || return 1
  works "$1" 'import torch, numpy, torch.distributed as d; assert d.is_gloo_available(); torch.ones(2).numpy()'
}

# Runs a line of Python in folder $1; a failure goes to its log in pip's form.
works() {
  local said
  said=$(cd / && env -u PYTHONPATH -u LD_LIBRARY_PATH "$1/bin/python" -c "$2" 2>&1) && return
  echo "ERROR: what was installed does not work: $(tail -1 <<<"$said")" >>"$1/pip.log"
  return 1
}

make_torch() {
  local toolkit
  toolkit=$(find_toolkit)
  plan "$toolkit"
  say "downloading about $megabytes MB into $final, once (FORKPOINT_TORCH_PYTHON=none does without)"
  for toolkit in ${toolkit:+"$toolkit"} ""; do
    rm -rf "$new"
    "$python3" -m venv "$new" >/dev/null 2>&1 ||
      unavailable "$python3 cannot make a virtual environment (on Debian the package python3-venv is missing)"
    lay_torch "$new" "$toolkit" && break
    # Only libraries that do not fit are worth a second try with all wheels, never a missing network.
    if [ -z "$toolkit" ] || ! grep -q '^ERROR: what was installed' "$new/pip.log"; then
      unavailable "torch $torch cannot be had: $(last_error "$new")"
    fi
    say "the CUDA libraries of $toolkit do not fit: downloading them as well"
  done
}

# Megatron Core says that it wants Python 3.12, and what the tests use of it runs with 3.11; it names no more than torch.
pip_packages() {
  local system platforms=()
  [[ "${names[*]}" == *megatron-core* ]] || { pip_in "$new" "${names[@]}"; return; }
  for system in manylinux_2_28 manylinux_2_24 manylinux_2_17 manylinux2014; do platforms+=(--platform "${system}_$(uname -m)"); done
  # The first line is pip's own way to install for a Python that does not run here, which goes with --target only.
  pip_in "$new" --python-version 3.12 --implementation cp --ignore-requires-python --only-binary=:all: "${platforms[@]}" --no-deps \
    --target "$(echo "$new"/lib/python*/site-packages)" "${names[@]}"
}

# A line of Python that fails where a package is not there. Megatron Core cannot be imported without Triton.
first_use() {
  case $1 in
    megatron-core) echo "import importlib.metadata as m; m.version('megatron-core'); import psutil, packaging" ;;
    *) echo "import ${1//-/_}" ;;
  esac
}

# An environment that sees the one of torch (its site-packages come after its own) and holds the packages alone.
make_packages() {
  local name names=()
  for name in "$@"; do read -ra pins <<<"$(pinned "$name")" && names+=("${pins[@]}"); done
  say "downloading ${names[*]} into $final, once"
  "$base/bin/python" -m venv --without-pip "$new" >/dev/null 2>&1 ||
    unavailable "no virtual environment can be made with $base"
  echo "$base"/lib/python*/site-packages >"$(echo "$new"/lib/python*/site-packages)/torch.pth"
  pip_packages || unavailable "${names[*]} cannot be had: $(last_error "$new")"
  for name in "$@"; do
    works "$new" "$(first_use "$name")" || unavailable "${names[*]} cannot be had: $(last_error "$new")"
  done
}

# What is in the folder, and its recipe: the mark of a whole one.
stamp() {
  echo "recipe $recipe"
  echo "torch $torch"
  echo "python $("$1/bin/python" -c 'import sys; print(sys.version.split()[0])') of $python3"
  [ "$final" != "$base" ] || echo "CUDA libraries $(readlink "$1/toolkit" || echo "from wheels")"
  "$1/bin/python" -m pip list --disable-pip-version-check --format freeze 2>/dev/null
}

# Makes folder $1 by running the rest of the line, which fills folder `new` beside it. One maker at a time; others
# wait, and find it made.
make_folder() {
  final=$1
  shift
  mkdir -p "$cache" 2>/dev/null && { exec 9>"$final.lock"; } 2>/dev/null || unavailable "$cache cannot be written"
  flock -w 3000 9 || unavailable "another installation into $final does not come to an end"
  is_whole "$final" && return
  rm -rf "$final".new.* "$final".old.*  # of makers that were killed: the lock is ours
  new=$final.new.$$
  trap 'rm -rf "$final".new.* "$final".old.*' EXIT
  trap 'exit 1' INT TERM HUP
  "$@"
  # Programs and the stamp name the final place.
  find "$new/bin" -type f -exec grep -qIF "$new" {} \; -exec sed -i "s|$new|$final|g" {} \;
  stamp "$new" >"$new/stamp"
  [ ! -e "$final" ] || mv -T "$final" "$final.old.$$"
  mv -T "$new" "$final" || unavailable "$final cannot be written"
}

mode=install
case ${1:-} in
  --background | --cached) mode=${1#--}; shift ;;
  -*) say "unknown option $1; known are --background and --cached"; exit 1 ;;
esac
mapfile -t packages < <(printf '%s\n' "$@" | sed '/^$/d' | sort -u)
for package in "${packages[@]}"; do
  [[ $package =~ ^[a-z0-9][a-z0-9-]*$ ]] || { say "$package is no package's name"; exit 1; }
done

given=${FORKPOINT_TORCH_PYTHON:-}
[ "$given" != none ] || unavailable "switched off by FORKPOINT_TORCH_PYTHON=none"
if [ -n "$given" ]; then
  command -v "$given" && exit
  say "FORKPOINT_TORCH_PYTHON names $given, which is no program"
  exit 1
fi
command -v python3 >/dev/null || unavailable "there is no python3"
IFS=' ' read -r tag python3 word < <(ask_python3 "${packages[@]}") || unavailable "python3 does not work"
case $word in
  yes) [ "$mode" = background ] || echo "$python3"; exit 0 ;;
  no) ;;
  *) unavailable "$python3 has torch, but not $word" ;;
esac

base=$cache/torch-$torch-$tag
wanted=$base
[ ${#packages[@]} -eq 0 ] || wanted=$base$(printf '+%s' "${packages[@]}")
if ! is_whole "$base" || ! is_whole "$wanted"; then
  case $mode in
    cached) unavailable "not installed in $wanted; ${*:0:1}${packages[*]/#/ } does that" ;;
    background)
      plan "$(find_toolkit)"
      is_whole "$base" || say "downloading about $megabytes MB into $base in the background, once"
      mkdir -p "$cache" 2>/dev/null || unavailable "$cache cannot be written"
      setsid "$(readlink -f "$0")" "${packages[@]}" </dev/null >"$cache/background.log" 2>&1 &
      exit 0
      ;;
  esac
  is_whole "$base" || (make_folder "$base" make_torch) || exit
  [ "$wanted" = "$base" ] || is_whole "$wanted" || (make_folder "$wanted" make_packages "${packages[@]}") || exit
fi
[ "$mode" = background ] || echo "$wanted/bin/python"
