"""`forkpoint checkpoints`, `replay` and `resume` on what a framework's own trainer writes: frameworks_test.py
transformers|lightning. Windows of a job that resumes from its own checkpoint are the run that was recorded, a fault is named at
its step, and each state that a resume loses by its name."""
import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, place, record, run

SAVE_TRAINER = ("--output_dir", "{dir}", "--save_strategy", "steps", "--save_steps", "4", "--shards", "true")
JOBS = {
    # Program, its preset, how it saves, the checkpoint's kind, a fault and its layer, arguments for `resume`, what is lost.
    "transformers": ("hf_resumed.py", "hf-trainer", SAVE_TRAINER, "checkpoint-4", ("lm_head@6", "lm_head"), (),
                     {"momentum": ["momentum"], "schedule": ["schedule (learning rate)"], "dtype": ["dtype"],
                      "position": ["random-number generator", "position in the data"]}),
    "lightning": ("lightning_resumed.py", "lightning", ("--dir", "{dir}", "--every", "4"), "epoch=0-step=4.ckpt",
                  ("net.3@6", "{net}3"), ("--save-args", "--dir {checkpoint_dir} --every 4"),
                  {"momentum": ["momentum"], "schedule": ["schedule (learning rate)"], "rng": ["random-number generator"],
                   "position": ["position in the data"], "dtype": ["dtype"]}),
}


def checkpoints(*arguments):
    done = run([FORKPOINT, "checkpoints", "--json", *arguments])
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def verdict_of(done):
    assert done.stdout and done.status in (0, 1, 2), f"status {done.status}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def saves(job, folder):
    return [word.format(dir=folder) for word in job[2]]


def listing_and_comparing(job, folder):
    ckpts = folder / "ckpts"
    found = checkpoints(ckpts)["checkpoints"]
    assert [c["step"] for c in found][:2] == [4, 8], found
    assert all(c["whole"] and c["kind"] == job[1] for c in found), found
    record(folder / "other", job[0], *saves(job, folder / "others"), level="step")
    same = checkpoints(f"{ckpts}@4", f"{folder}/others@4")
    assert same["verdict"] == "identical" and same["tensors_compared"] > 20 and same["values_compared"] > 20, same
    # One bit of one tensor, and a cut at each of the formats' ends.
    path = folder / "others" / job[3]
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        kept = file.read_bytes()
        for size in (0, 3, len(kept) // 2, len(kept) - 2):
            file.write_bytes(kept[:size])
            cut = next(c for c in checkpoints(folder / "others")["checkpoints"] if c["path"] == str(path))
            assert not cut["whole"], f"{file.name} cut to {size} of {len(kept)}"
        file.write_bytes(kept)
    data = bytearray(files[0 if len(files) == 1 else [f.suffix for f in files].index(".safetensors")].read_bytes())
    target = files[0] if len(files) == 1 else next(f for f in files if f.suffix == ".safetensors")
    data[-5 if len(files) > 1 else data.find(b"data/0") + 200] ^= 1  # of the last tensor; of the first storage
    target.write_bytes(data)
    found = checkpoints(f"{ckpts}@4", f"{folder}/others@4")
    assert found["verdict"] == "diverged" and len(found["tensors"]) == 1, found
    shutil.rmtree(folder / "others")


def replaying(job, folder):
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (folder / "ckpts").rglob("*") if p.is_file()}
    for name, steps, more in ("again", "4:6", ()), ("fork", "5:7", ("--fault", job[4][0])):
        done = run([FORKPOINT, "replay", "--checkpoint", folder / "ckpts", "--steps", steps, "--level", "layer", "--against", folder / "run",
                    "--json", "-o", folder / name, "--", sys.executable, PROGRAMS / job[0], *saves(job, folder / "ckpts"), *more])
        verdict = verdict_of(done)
        if name == "again":
            assert verdict["verdict"] == "identical", (verdict["reason"], place(verdict), done.stderr[-1500:])
        else:
            net = (verdict["first"]["layer"] or "")[:-1]
            assert place(verdict)[:4] == ("diverged", 6, "forward", job[4][1].format(net=net)), (place(verdict), done.stderr[-1500:])
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (folder / "ckpts").rglob("*") if p.is_file()}
    assert before == after, "the user's checkpoints were written to"


def resuming(job, folder, lost, names):
    command = [FORKPOINT, "resume", "--checkpoint-at", 4, "--steps", 7, "--preset", job[1], "--json", "-o", folder / f"resume-{lost}", *job[5]]
    command += ["--resume-args", f"--lose {lost}"] if lost else []
    verdict = verdict_of(run([*command, "--", sys.executable, PROGRAMS / job[0]]))
    states = verdict["resume"]["state"]
    assert verdict["verdict"] == ("diverged" if lost else "identical"), (lost, verdict["reason"], place(verdict))
    assert len(states) == len(names) and all(s.startswith(n) for s, n in zip(states, names)), (lost, states, place(verdict))


def main(package, *only):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {package} is not installed")
        sys.exit(77)
    job = JOBS[package]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        record(folder / "run", job[0], *saves(job, folder / "ckpts"))
        if not only or "list" in only:
            listing_and_comparing(job, folder)
            print("ok: listing and comparing", flush=True)
        if not only or "replay" in only:
            replaying(job, folder)
            print("ok: replaying", flush=True)
        for lost, names in {"": [], **job[6]}.items():
            if not only or (lost or "clean") in only:
                resuming(job, folder, lost, names)
                print(f"ok: resume {lost or 'clean'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
