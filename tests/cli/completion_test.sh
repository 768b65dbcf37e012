#!/usr/bin/env bash
# The completion scripts parse, offer every verb and every option that the program's help lists, and find run folders.
# Usage: completion_test.sh FORKPOINT COMPLETIONS
set -euo pipefail
program=$1 completions=$2
fail() { echo "completion_test: $*" >&2; exit 1; }

bash -n "$completions/forkpoint.bash"
if command -v zsh >/dev/null; then zsh -n "$completions/_forkpoint"; fi

# shellcheck disable=SC1091
source "$completions/forkpoint.bash"
complete_words() {  # complete_words WORD...: what bash would offer for the last word
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _forkpoint 2>/dev/null
  printf '%s\n' "${COMPREPLY[@]}"
}

verbs=$("$program" -h | sed -n '/^verbs:/,/^$/s/^  \([a-z]\+\) .*/\1/p')
[ "$(wc -w <<<"$verbs")" -ge 5 ] || fail "the program's help lists too few verbs: $verbs"
for verb in $verbs; do
  grep -qx -- "$verb" <<<"$(complete_words forkpoint "")" || fail "bash does not offer the verb $verb"
  grep -q "'$verb:" "$completions/_forkpoint" || fail "zsh does not offer the verb $verb"
  options=$("$program" "$verb" -h | sed -n '/^options:/,/^$/s/^  \(-., \|    \)\(--[a-z-]*\).*/\2/p')
  for option in $options; do
    grep -qx -- "$option" <<<"$(complete_words forkpoint "$verb" "-")" || fail "bash does not offer $verb $option"
    grep -q -- "$option" "$completions/_forkpoint" || fail "zsh does not offer $verb $option"
  done
  # And nothing that the program would refuse.
  for option in $(complete_words forkpoint "$verb" "--" | grep -vx -- '--help\|--'); do
    grep -qx -- "$option" <<<"$options" || fail "bash offers $verb $option, which does not exist"
  done
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/runs/good" "$folder/other"
touch "$folder/runs/good/run.json"
[ "$(complete_words forkpoint show "$folder/ru")" = "$folder/runs/" ] || fail "a folder on the way to a run is not offered"
[ "$(complete_words forkpoint show "$folder/runs/g")" = "$folder/runs/good " ] || fail "a run folder is not offered"
grep -qx layer <<<"$(complete_words forkpoint record --level "")" || fail "levels are not offered"
echo "completions offer every verb and option"
