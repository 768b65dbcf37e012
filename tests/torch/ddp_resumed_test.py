"""A DistributedDataParallel job that goes on right at its checkpoint lays out its buckets otherwise in that step: the same training,
unless a value in them differs."""
import json
import pathlib
import sys
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, run
from parallel_driver import expect, place, printed, show

JOB = [sys.executable, PROGRAMS / "ranks.py", 2, "ddp_resumed.py", "--steps", 6]
AT = 4


def straight(folder, *words):
    out = pathlib.Path(folder, "ckpts")
    out.mkdir(parents=True)
    done = run([FORKPOINT, "record", "--level", "layer", "-o", f"{folder}/run", "--", *JOB, "--out", out, "--every", AT, *words])
    assert done.status == 0 and "torch bridge" not in done.stderr, f"straight {words}: status {done.status}: {done.stderr[-2000:]}"
    return printed(done)


def resumed(folder, name, *words):
    command = [FORKPOINT, "replay", "--checkpoint", f"{folder}/ckpts", "--checkpoint-pattern", "ckpt_{step}.pt", "--steps", f"{AT}:5",
               "--level", "layer", "--against", f"{folder}/run", "--json", "-o", f"{folder}/{name}", "--", *JOB, "--from", "{checkpoint}"]
    done = run(command + list(words))
    assert done.status in (0, 1, 2) and done.stdout, f"{name}: status {done.status}: {done.stderr[-1500:]}"
    return json.loads(done.stdout)


def messages(folder, step):
    """[number of elements] of what rank 0 hands to its all-reduces."""
    rows = show(folder, "--steps", step, "--ranks", 0, "--records")["records"]
    return [r["shape"] for r in rows if (r["op"], r["tensor"]) == ("all_reduce", "input")]


def goes_on(folder, *words):
    straight(folder, *words)
    verdict = resumed(folder, "resumed", *words)
    first, later = (messages(f"{folder}/resumed", step) for step in (AT, AT + 1))
    if "--static" not in words:  # there the second step is as the first, but for the map of used parameters
        expect(messages(f"{folder}/run", AT), later, "the messages of the straight job and of a later step of the resumed one")
    assert first != later, f"the buckets of the first step are no others: {first}"
    if "--static" in words:
        expect(later, first[1:], "in its second step what it sends is as in the first, but for the map of used parameters")
        assert later != messages(f"{folder}/run", AT + 1), f"the buckets of the second step are no others: {later}"
    expect((verdict["verdict"], verdict["first"]), ("identical", None), f"{words}: {verdict['reason']} {verdict['notes']}")
    said = [n for n in verdict["notes"] if f"of step {AT} carry the same elements in another layout: all_reduce of" in n]
    expect(len(said), 1, f"{words}: the note that says so, in {verdict['notes']}")
    limits = verdict["coverage"]["limits"]
    assert any("laid out in another way in each run" in text for text in limits), f"what was not compared bit by bit, in {limits}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        goes_on(f"{folder}/f32")
        verdict = resumed(f"{folder}/f32", "altered", "--fault", AT)
        expect(place(verdict), ("diverged", AT, 1, "collective", None, "all_reduce", "input"), "a value altered in a bucket of another layout")
        expect((verdict["also_first"], sorted(verdict["ranks_diverged"])), ([], [0, 1]), "and nobody else is an origin")
        goes_on(f"{folder}/bf16", "--dtype", "bfloat16")
        goes_on(f"{folder}/static", "--static")
        verdict = resumed(f"{folder}/static", "altered", "--static", "--fault", AT)
        expect(place(verdict)[:3], ("diverged", AT, 1), "a value altered in a bucket of a static graph")
    print("resumed right at a checkpoint: buckets of another layout are no divergence, another value is")
