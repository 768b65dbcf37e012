#!/usr/bin/env bash
# The command twice, as ranks 0 and 1 of 2, each told as a launcher would tell it. Their output comes in the order of the
# ranks; the status is the worse one.
# Usage: two_ranks.sh torchrun|isolated|openmpi COMMAND...
# isolated: as torchrun, and each process sees its own GPU only.
style=${1:?usage: two_ranks.sh torchrun|isolated|openmpi COMMAND...}
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for rank in 0 1; do
  case $style in
    torchrun) variables=(RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2) ;;
    isolated)
      IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-0,1}"
      variables=(RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 CUDA_VISIBLE_DEVICES="${devices[rank]}")
      ;;
    openmpi) variables=(OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=2) ;;
    *) echo "two_ranks.sh: no launcher is called $style" >&2; exit 2 ;;
  esac
  env NCCL_PROGRAM_MEETING="$folder/meeting" "${variables[@]}" "$@" >"$folder/$rank.out" 2>"$folder/$rank.err" &
  ranks[rank]=$!
done
worst=0
for rank in 0 1; do
  wait "${ranks[rank]}"
  status=$?
  [ "$status" -gt "$worst" ] && worst=$status
done
cat "$folder"/[01].out
cat "$folder"/[01].err >&2
exit "$worst"
