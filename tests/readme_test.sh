#!/usr/bin/env bash
# Runs the commands of README.md's `sh` blocks as they stand (all but make), in a scratch folder in which build/ is the build
# under test. A diff line may exit with the status that its comment names. Usage: tests/readme_test.sh SOURCE BUILD
set -euo pipefail
source=$(cd "${1:?}" && pwd)
build=$(cd "${2:?}" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
ln -s "$build" "$scratch/build"
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
  count=$((count + 1))
done < <(awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' "$source/README.md")
[ "$count" -ge 8 ] || { echo "only $count commands found in README.md: is its form still the one this test reads?"; exit 1; }
[ -s report.html ] || { echo "the README's report.html was not written"; exit 1; }
echo "$count commands of README.md ran as it says"
