#!/usr/bin/env bash
# Installs into an empty folder and works from there, also after the folder has been moved.
# Usage: install_test.sh CMAKE BUILD TRAINER LIBDIR
set -euo pipefail
cmake=$1 build=$2 trainer=$3 libdir=$4
fail() { echo "install_test: $*" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset FORKPOINT_PROBE

DESTDIR=$folder/stage "$cmake" --install "$build" --prefix /usr/local >/dev/null
root=$folder/stage/usr/local
for file in bin/forkpoint "$libdir/libforkpoint.so" include/forkpoint.h share/bash-completion/completions/forkpoint share/zsh/site-functions/_forkpoint; do
  [ -f "$root/$file" ] || fail "$file was not installed; there is: $(cd "$root" && find . -type f | tr '\n' ' ')"
done

mv "$root" "$folder/moved"
cd "$folder"
grep -qF "$folder/moved/$libdir/libforkpoint.so" <<<"$("$folder/moved/bin/forkpoint" version)" || fail "the installed program does not find the installed probe"
preload=$("$folder/moved/bin/forkpoint" record -o nothing -- printenv LD_PRELOAD 2>/dev/null)
[ "$preload" = "$folder/moved/$libdir/libforkpoint.so" ] || fail "record preloads '$preload'"
for run in a b; do
  "$folder/moved/bin/forkpoint" record -o "$run" -- "$trainer" 3 2>/dev/null || fail "record failed"
done
grep -q '^identical' <<<"$("$folder/moved/bin/forkpoint" diff a b)" || fail "two equal runs are not identical"

# The header alone is enough to compile against.
printf '#include <forkpoint.h>\nint main(void) { forkpoint_step_begin(0); return forkpoint_active(); }\n' >user.c
"${CC:-cc}" -std=c99 -Wall -Wextra -Werror -I "$folder/moved/include" user.c -o user -ldl || fail "forkpoint.h does not compile as C"
./user || fail "a program without the probe is not dormant"
echo "the installed tree works"
