"""The whole way, on a DDP job of two ranks that nobody edited: it runs with the probe asleep, is attached around the step from
which a sum comes out otherwise each time, that window is replayed from a checkpoint and compared, and bisected: to the launch where
there are two GPUs, else (gloo) to the op. Says how many steps were run again and how long each stage took."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import torch

from bridge_driver import FORKPOINT, environment, run, wait_for

ON_GPU = torch.cuda.is_available() and torch.cuda.device_count() >= 2
PACE = 0.05
SAMPLE = pathlib.Path(__file__).resolve().parents[2] / "samples" / "torch" / "train.py"


def launcher(*more):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", SAMPLE,
            "--steps", "100000", *(["--dim", "256", "--batch", "32"] if ON_GPU else []), *more]


def ps(job):
    ranks = json.loads(run([FORKPOINT, "ps", "--json"]).stdout)
    return [rank for rank in ranks if rank["job"] == job]


def attached(folder, job, spike):
    """A run of the steps around the spike, of a job that goes on meanwhile."""
    process = subprocess.Popen([str(word) for word in [FORKPOINT, "run", "--job", job, "--", *launcher(
        "--out", folder / "ckpts", "--every", 10, "--unordered", spike, "--pace", PACE)]], env=environment(), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(ps(job)) == 2, "both ranks in the list")
        wait_for(lambda: (folder / "ckpts" / "ckpt_10.pt").exists(), "a checkpoint")
        begun = time.monotonic()
        done = run([FORKPOINT, "attach", "--job", job, "--level", "layer", "--from", spike - 2, "--to", spike + 1, "-o", folder / "live"])
        assert done.status == 0, done.stderr
        print(f"attached for steps {spike - 2} to {spike + 1}: {time.monotonic() - begun:.1f} s with the wait for the first of them")
        wait_for(lambda: (folder / "ckpts" / f"ckpt_{spike + 10 - spike % 10}.pt").exists(), "a checkpoint behind the window")
        assert process.poll() is None, "the job goes on"
    finally:
        process.terminate()
        process.wait(timeout=60)


def main():
    spike = 87
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "ckpts").mkdir()
        attached(folder, f"spike-{folder.name}", spike)
        again = launcher("--from", "{checkpoint}", "--out", "{checkpoint_dir}", "--unordered", spike)
        begun = time.monotonic()
        done = run([FORKPOINT, "replay", "--json", "--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.pt", "--steps",
                    f"{spike - 2}:{spike + 1}", "--level", "layer", "--against", folder / "live", "-o", folder / "replay", "--", *again])
        assert done.status == 1, f"replay: status {done.status}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        verdict = json.loads(done.stdout)
        first = verdict["first"]
        assert (first["step"], first["rank"], first["phase"], first["layer"], first["tensor"]) == (spike, 1, "forward", "blocks.1.experts", "output"), first
        said = re.search(r"(\d+) steps in ([0-9.]+) s replayed", done.stderr)
        print(f"replayed {said[1]} steps in {said[2]} s ({time.monotonic() - begun:.1f} s with the comparison): {verdict['reason']}")

        command = " ".join(str(word) for word in again)
        done = run([FORKPOINT, "bisect", "--json", "--checkpoint", folder / "ckpts", "--checkpoint-pattern", "ckpt_{step}.pt", "--steps",
                    f"{spike - 7}:{spike + 1}", "--good", command, "--bad", command, "-o", folder / "found"])
        assert done.status == 1, f"bisect: status {done.status}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        found = json.loads(done.stdout)
        first = found["first"]
        assert (first["step"], first["rank"], first["phase"], first["layer"]) == (spike, 1, "forward", "blocks.1.experts"), first
        if ON_GPU:
            assert first["kind"] == "launch" and "index" in first["kernel"].lower(), first
            assert found["cause"]["class"] == "unordered_accumulation", found["cause"]
            assert any(" outputs in 20 runs" in line for line in found["bisect"]["retry"]), found["bisect"]["retry"]
        else:
            assert first["op"].startswith("aten::"), first
        assert any("differ" in line for line in found["bisect"]["operands"]), found["bisect"]["operands"]
        for stage in found["bisect"]["stages"]:
            print(f"  {stage['name']}: {stage['windows']} windows, {stage['steps']} steps, {stage['seconds']:.1f} s: {stage['found']}")
        print(f"bisected by {found['bisect']['windows']} windows and {found['bisect']['steps_replayed']} steps to "
              f"{first['kernel'] or first['op']}")


main()
