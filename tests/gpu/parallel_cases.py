"""PyTorch on two GPUs at level layer: DistributedDataParallel, fully_shard, groups of ranks, tensor parallel.

Equal runs are identical and without a gap, a planted fault is found on its rank, and within one run replicas are told from
shards.
"""

import json
import pathlib

from case_driver import Case, Expected, Trouble, Workplace, describe, torchrun


def recorded(place: Workplace, name: str, program: str, words=(), step_on=None):
    return place.record_whole(name, torchrun(program, *words), level="layer", step_on=step_on)


def replicas(place: Workplace, run: str):
    done = place.run([place.forkpoint, "diff", "--replicas", place.folder / run, "--json"])
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise Trouble(f"diff --replicas ended with status {done.status}: {done.stderr.strip()}") from None


def boxes(place: Workplace, run: str):
    """Shards, each with its place in the whole: how many were recorded."""
    streams = pathlib.Path(place.folder / run)
    if not streams.is_dir():
        raise Trouble(f"no run {streams}")
    return sum(bool(row.get("global_shape")) for row in place.show(run, "--records")["records"])


def case(name, program, *, step_on=None, planted=None, words=("planted",), ops=(), shards=False, in_sync=None):
    """in_sync: what diff --replicas must not say of an undisturbed run."""

    def play(place: Workplace):
        plain = place.run(torchrun(program))
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded: {plain.stderr[-3000:]}")
        runs = [recorded(place, run, program, step_on=step_on) for run in "ab"]
        verdict = place.diff("a", "b")
        problems = Expected("identical").problems(verdict)
        found = describe(verdict)
        if any(run.losses() != plain.losses() for run in runs):
            problems.append("other losses than unrecorded")
        seen = {row["op"] for row in place.show("a", "--records")["records"] if row["kind"] == "collective"}
        problems += [f"no {op} was recorded, only {sorted(seen)}" for op in ops if op not in seen]
        if shards and boxes(place, "a") == 0:
            problems.append("no shard was recorded with its place in the whole")
        if in_sync and replicas(place, "a")["verdict"] == "diverged":
            problems.append("an undisturbed run is said to be out of sync with itself")
        if planted:
            recorded(place, "c", program, words, step_on=step_on)
            verdict = place.diff("a", "c")
            problems += [f"planted: {problem} ({describe(verdict)})" for problem in planted.problems(verdict)]
            found += f"; planted: {describe(verdict)}"
        return found, problems

    return Case(name, play, "identical" + (f"; planted: {planted}" if planted else ""), 2, ("torch",))


def norm_out_of_sync(place: Workplace):
    recorded(place, "run", "tensor_parallel", ("norm",))
    verdict = replicas(place, "run")
    problems = Expected(step=2).problems(verdict)
    if not problems and verdict["first"]["layer"] != "0":
        problems.append(f"layer {verdict['first']['layer']}, expected 0, the norm")
    return describe(verdict | {"headline": verdict["reason"]}), problems


def all_cases():
    struck = Expected(step=2, rank=1)
    return [
        case("layer_ddp", "ddp", planted=struck, ops=("all_reduce",), in_sync=True),
        case("layer_fsdp2", "fsdp2", planted=struck, ops=("all_gather", "reduce_scatter"), shards=True, in_sync=True),
        case("layer_new_groups", "new_groups", step_on="^step$", ops=("all_reduce", "all_gather")),
        case("layer_tensor_parallel", "tensor_parallel", planted=struck, shards=True, in_sync=True),
        Case("layer_norm_out_of_sync", norm_out_of_sync, "diverged, step 2, the norm", 2, ("torch",)),
    ]
