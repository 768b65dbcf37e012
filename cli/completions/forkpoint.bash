# bash completion of forkpoint: verbs, options, run folders, and the command after `--`.

# Folders that hold a run.json, and folders on the way to one.
_forkpoint_runs() {
  local folder
  COMPREPLY=()
  while IFS= read -r folder; do
    if [[ -e $folder/run.json ]]; then
      COMPREPLY+=("$folder ")
    else
      COMPREPLY+=("$folder/")
    fi
  done < <(compgen -d -- "$1")
  compopt -o nospace 2>/dev/null
}

_forkpoint() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[1]} options i
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "record diff replay bisect resume check price doctor show merge checkpoints run ps attach detach version help --help --version" -- "$current")
    return
  fi
  if [[ $verb == record || $verb == replay || $verb == resume || $verb == check || $verb == price || $verb == doctor || $verb == run ]]; then
    for ((i = 2; i < COMP_CWORD; ++i)); do
      if [[ ${COMP_WORDS[i]} == -- ]]; then
        if declare -F _command_offset >/dev/null; then
          _command_offset $((i + 1))
        else
          mapfile -t COMPREPLY < <(compgen -c -f -- "$current")
        fi
        return
      fi
    done
  fi
  case $previous in
    -o | --output)
      mapfile -t COMPREPLY < <(compgen -d -- "$current")
      return
      ;;
    --checkpoint | --bad-checkpoint | --only-read)
      mapfile -t COMPREPLY < <(compgen -d -- "$current")
      return
      ;;
    --against)
      _forkpoint_runs "$current"
      return
      ;;
    --preset)
      mapfile -t COMPREPLY < <(compgen -W "megatron hf-trainer dcp lightning deepspeed minigpt" -- "$current")
      return
      ;;
    --html | --log | --reference | --junit | --summary)
      mapfile -t COMPREPLY < <(compgen -f -- "$current")
      return
      ;;
    --level)
      mapfile -t COMPREPLY < <(compgen -W "step layer launch" -- "$current")
      return
      ;;
    --phase)
      mapfile -t COMPREPLY < <(compgen -W "load data forward backward collective optimizer state" -- "$current")
      return
      ;;
    --steps | --ranks | --every | --max-size | --first-step | --step-on | --launch | --retry | --layer | --tensor | --launches | --checkpoint-pattern | --checkpoint-at | --save-args | --resume-args | --ops | --timeout | --look-timeout | --pattern | --job | --from | --to | --good | --bad | --script | --tries | --rounds) return ;;
  esac
  case $verb in
    record) options="--output --level --steps --ranks --every --max-size --mask-names --first-step --deterministic --step-on --ops --watch --on-trigger --deepen-steps --inputs --launch --retry --keep-allocators --save-operands --certify --help --" ;;
    diff) options="--steps --ranks --json --replicas --html --full-scan --no-verify --help" ;;
    replay) options="--checkpoint --checkpoint-pattern --only-read --preset --steps --against --output --level --ops --ranks --deterministic --step-on --inputs --timeout --show-output --json --help --" ;;
    bisect) options="--good --bad --checkpoint --bad-checkpoint --checkpoint-pattern --only-read --preset --steps --script --level --tries --output --log --resume --deterministic --step-on --timeout --show-output --json --help" ;;
    resume) options="--checkpoint-at --steps --save-args --resume-args --preset --checkpoint-pattern --output --level --deterministic --step-on --timeout --show-output --json --help --" ;;
    check) options="--reference --steps --first-step --update --junit --summary --output --deterministic --step-on --timeout --show-output --help --" ;;
    price) options="--deterministic --steps --rounds --skip-alone --output --html --step-on --timeout --show-output --json --help --" ;;
    doctor) options="--steps --level --no-run --output --step-on --timeout --look-timeout --show-output --json --help --" ;;
    show) options="--steps --ranks --layer --phase --tensor --records --summary --launches --anomalies --json --help" ;;
    merge) options="--output --help" ;;
    checkpoints) options="--pattern --content --tensors --json --help" ;;
    run) options="--job --help --" ;;
    ps) options="--json --help" ;;
    attach) options="--job --all --output --level --steps --from --to --max-size --mask-names --timeout --help" ;;
    detach) options="--job --all --help" ;;
    version) options="--json --help" ;;
    help) options="record diff replay bisect resume check price doctor show merge checkpoints run ps attach detach version" ;;
    *) return ;;
  esac
  if [[ $current == -* || $verb == help || $verb == record || $verb == replay || $verb == resume || $verb == check || $verb == doctor || $verb == run || $verb == ps || $verb == attach || $verb == detach ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
  elif [[ $verb == diff || $verb == show || $verb == merge || $verb == bisect ]]; then
    _forkpoint_runs "$current"
  elif [[ $verb == checkpoints ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
  fi
}

complete -F _forkpoint forkpoint
