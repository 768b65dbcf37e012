"""Cases of launch_cases.py that are more than two recordings and a comparison.

Jobs that fail, fork, are killed or profile themselves, repetitions of one launch, certificates.
"""

import json
import re
import shutil
import subprocess
import sys

from case_driver import PROGRAMS, Case, Expected, Trouble, Workplace, describe, python, torchrun

SUSPECT = re.compile(r"--launch[ =](\d+):(\d+)")


def kernels_named(place: Workplace, run: str, step: int, part: str):
    """Launch rows of one step whose kernel's name holds `part`."""
    rows = place.show(run, "--launches", step)["launches"]
    return [row for row in rows if row["kind"] == "kernel" and part in (row["demangled"] or "").lower()]


def suspect(place: Workplace, verdict: dict, part: str):
    """Step and index of the launch that a verdict names: what its next command says, else by the kernel's name."""
    named = SUSPECT.search(verdict["cause"]["next"] or "")
    if named:
        return int(named[1]), int(named[2])
    step = verdict["first"]["step"]
    rows = kernels_named(place, "b", step, part)
    if not rows:
        raise Trouble(f"step {step} has no kernel named {part}")
    return step, rows[0]["index"]


def outputs_of_repetitions(place: Workplace, run: str, step: int, index: int):
    """How many repetitions of the launch were recorded, and how many different outcomes they had."""
    rows = [row for row in place.show(run, "--launches", step)["launches"] if row["retry_of"] == index]
    return len(rows), len({tuple(buffer["digest"] for buffer in row["buffers"]) for row in rows})


def retried(program: str, part: str):
    """The launch that a first verdict names, repeated 20 times in a new recording."""

    def play(place: Workplace):
        for run in "ab":
            place.record_whole(run, python(program))
        step, index = suspect(place, place.diff("a", "b"), part)
        place.record_whole("again", python(program), ["--retry", 20, "--launch", f"{step}:{index}"])
        verdict = place.diff("a", "again")
        problems = Expected(step=2, kernel=(part,), causes=("unordered_accumulation",), exact=True).problems(verdict)
        repetitions, outputs = outputs_of_repetitions(place, "again", step, index)
        if repetitions != 20 or outputs < 2:
            problems.append(f"{repetitions} repetitions with {outputs} outputs, expected 20 with several")
        counted = re.search(r"gave ([\d,]+) different outputs", " ".join(verdict["cause"]["evidence"]))
        if not counted or int(counted[1].replace(",", "")) < 2:
            problems.append("the evidence does not say how many outputs came")
        return f"{describe(verdict)}; {outputs} outputs of {repetitions}", problems

    return Case(f"{program}_retried", play, f"diverged, step 2, {part}, unordered_accumulation, several outputs")


def retry_leaves_program():
    """A launch of a deterministic job is repeated, and the job goes on as if it had run once."""

    def play(place: Workplace):
        plain = place.record_whole("a", python("equal_runs_gpt"))
        rows = kernels_named(place, "a", 2, "layer_norm")
        if not rows:
            raise Trouble("step 2 has no kernel named layer_norm")
        index = rows[0]["index"]
        again = place.record_whole("again", python("equal_runs_gpt"), ["--retry", 5, "--launch", f"2:{index}"])
        verdict = place.diff("a", "again")
        problems = Expected("identical").problems(verdict)
        if plain.losses() != again.losses():
            problems.append("the losses changed")
        counts = outputs_of_repetitions(place, "again", 2, index)
        if counts != (5, 1):
            problems.append(f"{counts[0]} repetitions with {counts[1]} outputs, expected 5 with one")
        return describe(verdict), problems

    return Case("retry_leaves_program", play, "identical, 5 repetitions with one output")


def altered_all_reduce():
    """Four bytes of one all-reduce's result are overwritten on rank 1, behind the recording's back."""
    causes = ("hardware_or_sporadic", "missing_sync", "stream_race", "overwritten_input")
    expected = Expected(step=3, rank=1, op="all_reduce", causes=causes)

    def play(place: Workplace):
        library = find_nccl()
        shim = place.folder / "altered_nccl.so"
        compiler = shutil.which("cc") or "gcc"
        compiled = place.run([compiler, "-shared", "-fPIC", "-O2", PROGRAMS / "altered_nccl.c", "-o", shim])
        if compiled.status != 0:
            raise Trouble(f"the shim does not compile: {compiled.stderr}")
        # In this order: the probe calls the shim, and that calls NCCL. `record` itself would put the probe last.
        preload = f"{place.build / 'libforkpoint.so'}:{shim}:{library}"
        for run, altered in (("a", {}), ("b", {"ALTERED_RANK": "1", "ALTERED_CALL": "7"})):  # two calls a step: step 3
            place.record_whole(run, ["env", f"LD_PRELOAD={preload}", *torchrun("altered_all_reduce")], changes=altered)
        verdict = place.diff("a", "b")
        problems = expected.problems(verdict)
        if verdict["first"] and verdict["first"]["kind"] != "collective":
            problems.append(f"kind {verdict['first']['kind']}, expected collective")
        return describe(verdict), problems

    return Case("altered_all_reduce", play, str(expected), gpus=2)


def find_nccl():
    """The NCCL that torch brings, asked in a process of its own."""
    script = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + '/lib/libnccl.so.2')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode != 0:
        raise Trouble(f"no NCCL beside torch: {done.stderr.strip()}")
    return done.stdout.strip()


def native_allocator():
    """The user has set the allocator: it stays, and the extents of the buffers are known all the same."""
    users = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    def play(place: Workplace):
        runs = [place.record_whole(run, python("equal_runs_gpt"), changes=users) for run in "ab"]
        verdict = place.diff("a", "b")
        problems = Expected("identical").problems(verdict)
        if "allocator native expandable_segments:True" not in runs[0].stdout:
            problems.append(f"the allocator was changed: {runs[0].stdout.splitlines()[0]}")
        if "PYTORCH" in place.show("a")["manifest"]["versions"].get("set by forkpoint", ""):
            problems.append("the manifest says that the allocator was set")
        return describe(verdict), problems + list(problems_of_extents(place))

    return Case("equal_runs_native_allocator", play, "identical, the allocator left alone")


def problems_of_extents(place: Workplace):
    """Run a, with PyTorch's own allocator, against a new run in which each tensor is an allocation."""
    done = place.record_whole("own", python("equal_runs_gpt"))
    if "allocator cudaMallocAsync" not in done.stdout:
        yield f"where the user sets nothing, each tensor should be an allocation: {done.stdout.splitlines()[0]}"
    if "PYTORCH_ALLOC_CONF" not in place.show("own")["manifest"]["versions"].get("set by forkpoint", ""):
        yield "the manifest does not say that the allocator was set"
    hashed = {}
    for run in ("a", "own"):
        rows = place.show(run, "--launches", 2)["launches"]
        buffers = [buffer for row in rows if row["kind"] == "kernel" for buffer in row["buffers"]]
        hashed[run] = sum(buffer["bytes"] for buffer in buffers)
        windows = sum("window" in buffer["flags"] for buffer in buffers)
        if windows > len(buffers) // 100:
            yield f"run {run}: {windows} of {len(buffers)} buffers are of unknown extent"
    if hashed["a"] > 3 * hashed["own"]:  # whole segments of 20 MiB would be far more
        yield f"{hashed['a']} bytes hashed in a step, {hashed['own']} with one allocation a tensor"


def dataloader_workers():
    command = python("dataloader_workers", flags=["-W", "always::DeprecationWarning"])

    def play(place: Workplace):
        plain = place.run(command)
        warnings = plain.stderr.count("DeprecationWarning")
        problems = []
        for run in "ab":
            done = place.record_whole(run, command)
            if done.stdout != plain.stdout:
                problems.append(f"recording {run} printed something else than the job does unrecorded")
            if done.stderr.count("DeprecationWarning") > warnings or done.complaints():
                problems.append(f"warnings, of which the unrecorded job has {warnings}: {done.stderr}")
        verdict = place.diff("a", "b")
        return describe(verdict), problems + Expected("identical").problems(verdict)

    return Case("dataloader_workers", play, "identical, no warnings")


def killed_job():
    def play(place: Workplace):
        place.record_whole("a", python("killed_job", "A"))
        killed = place.record("b", python("killed_job", "B"))
        problems = [] if killed.status in (137, -9) else [f"status {killed.status}, expected 137 (SIGKILL)"]
        shown = place.show("b")
        if shown["state"] != "died":
            problems.append(f"show says {shown['state']}, expected died")
        steps = sum(rank["complete_steps"] for rank in shown["ranks"])
        if steps < 4:
            problems.append(f"{steps} whole steps are left of the 5 before the one in which the job was killed")
        verdict = place.diff("a", "b")
        if verdict["verdict"] != "incomparable":
            problems.append(f"{verdict['verdict']} ({verdict['reason']}), expected incomparable")
        return f"{describe(verdict)}; {steps} whole steps", problems

    return Case("killed_job", play, "show says died; incomparable")


def torch_profiler():
    """The job profiles itself: in the recorded window forkpoint holds CUPTI, behind it the profiler can have it."""

    def play(place: Workplace):
        plain = place.run(python("torch_profiler", "2:3"))
        recorded = place.record_whole("a", python("torch_profiler", "2:3"))
        behind = place.record_whole("b", python("torch_profiler", "5:6"), ["--steps", "2:3"])
        problems = []
        for name, done in (("recorded", recorded), ("behind the window", behind)):
            if done.losses() != plain.losses():
                problems.append(f"{name}: other losses than unrecorded")
        if len(recorded.complaints()) > 1:
            problems.append(f"more than one line: {recorded.complaints()}")
        if "profiled True kernels True" not in behind.stdout:
            problems.append("the profiler saw no kernels behind the recorded window")
        recorded_steps = place.show("b")["step_count"]
        if recorded_steps != 2:
            problems.append(f"{recorded_steps} steps recorded, expected 2")
        return recorded.stdout.splitlines()[-1], problems

    return Case("torch_profiler", play, "the job's results; behind the window its profiler sees kernels")


def failing(program: str, status: int, complaint: str, options=()):
    """The job's own end, and no other."""

    def play(place: Workplace):
        plain = place.run(python(program))
        done = place.record("a", python(program), options=options)
        problems = []
        if plain.status != status:
            problems.append(f"unrecorded it ends with status {plain.status}, expected {status}")
        if done.status != status:
            problems.append(f"status {done.status}, expected {status} (None: it hangs)")
        if complaint not in done.stderr:
            problems.append(f"its own error is not on stderr: {complaint}")
        if done.losses() != plain.losses():
            problems.append("other losses than unrecorded")
        shown = place.show("a")
        if shown["step_count"] < 3:
            problems.append(f"{shown['step_count']} steps recorded, it had 3 before it failed")
        return f"status {done.status}", problems

    return Case(program, play, f"status {status}")


def certified(name: str, program: str, granted=True):
    """The observer's certificate; a job that is not repeatable by itself must not get one."""

    def play(place: Workplace):
        done = place.record("run", python(program), ["--certify"])
        path = place.folder / "run" / "certificate.json"
        if not path.exists():
            raise Trouble(f"no certificate, status {done.status}")
        certificate = json.loads(path.read_text())
        problems = [] if certificate["granted"] == granted else [f"{certificate}"]
        if certificate["kernels"] == 0 or certificate["copies_to_host_equal"] == 0:
            problems.append(f"nothing was compared: {certificate}")
        status = 0 if granted else 125
        if done.status != status:
            problems.append(f"status {done.status}, expected {status}")
        return f"granted: {certificate['granted']}, {certificate['kernels']} kernels", problems

    return Case(name, play, f"granted: {granted}")


def all_cases():
    return [
        retry_leaves_program(),
        dataloader_workers(),
        killed_job(),
        torch_profiler(),
        failing("failing_program", 3, ""),
        # With cudaMallocAsync, PyTorch itself aborts when it frees memory after a device assert.
        failing("cuda_error_program", 1, "device-side assert", options=("--keep-allocators",)),
        certified("certify_gpt", "equal_runs_gpt"),
        certified("certify_graph", "equal_runs_graph"),
        certified("certify_triton", "triton_mlp"),
        certified("certify_refused", "scatter_add_atomics", granted=False),
    ]
