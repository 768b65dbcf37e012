#!/usr/bin/env bash
# Runs the commands of README.md's `sh` blocks as they stand (all but make), in a scratch folder in which build/ is the build
# under test and samples/ the source's. A line may exit with the status that its comment names; else with 0.
# Usage: tests/readme_test.sh SOURCE BUILD [TAG]   TAG: the blocks that begin with `sh TAG`, which need more than this build
set -euo pipefail
source=$(cd "${1:?}" && pwd)
build=$(cd "${2:?}" && pwd)
tag=${3:-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
ln -s "$build" "$scratch/build"
ln -s "$source/samples" "$scratch/samples"
cd "$scratch"

count=0
while IFS= read -r line; do
  case $line in make*|'') continue ;; esac
  expected=0
  [[ $line =~ 'exit status '([0-9]+) ]] && expected=${BASH_REMATCH[1]}
  [[ $line == *' --json'* ]] && expected=1
  status=0
  bash -c "$line" >output 2>&1 </dev/null || status=$?
  if [ "$status" -ne "$expected" ]; then
    printf 'README command failed: %s\nexit status %s, expected %s\n' "$line" "$status" "$expected"
    cat output
    exit 1
  fi
  [ -z "$tag" ] || { printf '$ %s\n' "$line"; cat output; }
  count=$((count + 1))
done < <(awk -v begin='```sh'"${tag:+ $tag}" '$0 == begin { inside = 1; next } /^```/ { inside = 0 } inside' "$source/README.md")
fewest=8
[ -z "$tag" ] || fewest=3
[ "$count" -ge $fewest ] || { echo "only $count commands found in README.md: is its form still the one this test reads?"; exit 1; }
[ -n "$tag" ] || [ -s report.html ] || { echo "the README's report.html was not written"; exit 1; }
echo "$count commands of README.md ran as it says"
