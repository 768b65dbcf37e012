"""Runs a program under `forkpoint record`, twice, and holds the verdict of `forkpoint diff` against what is expected.

Used by lists of cases (launch_cases.py, multi_gpu_cases.py, tests/gpu/two_gpus.py); needs nothing but Python's own
library.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
TIMEOUT_S = 240  # of one command: the slowest compiles for a minute, and several cases run at a time

# Repeatable cuBLAS, and no setting of the caller's that changes what is recorded.
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
SETTINGS |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads would be forked with
FOREIGN = re.compile(
    r"^(FORKPOINT_|LD_PRELOAD$|PYTORCH_(CUDA_)?ALLOC_CONF$|PYTORCH_NO_CUDA_MEMORY|CUDA_INJECTION64_PATH$|NVTX_INJECTION"
    r"|XLA_|TF_|RANK$|LOCAL_RANK$|WORLD_SIZE$|OMPI_|SLURM_|PMI)"
)
# Classes that say no more than that one of the candidates holds.
BROAD = {"nondeterministic_op", "unknown"}


@dataclasses.dataclass
class Done:
    """How a command ended. status: None when it ran longer than TIMEOUT_S."""

    command: list
    status: int | None
    stdout: str
    stderr: str

    def losses(self):
        # Ranks print as they come, and what two of them print at once may come as one line.
        return sorted(part.splitlines()[0] for part in re.split(r"(?=\bstep \d|step \d+ rank)", self.stdout) if part.startswith("step "))

    def complaints(self):
        """Lines of forkpoint's on stderr, besides the one that says what was recorded."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("forkpoint: ")]
        return [line for line in lines if not re.search(r": \d+ ranks?, ", line)]


class Trouble(Exception):
    """A case failed; the text says how."""


def one_of(options: Sequence[str], text: str):
    return any(option.lower() in text.lower() for option in options)


@dataclasses.dataclass
class Expected:
    """What a verdict must say. causes: the right class first, then others that are no mistake either."""

    outcome: str = "diverged"
    step: int | None = None
    kernel: Sequence[str] = ()  # one of these occurs in its name
    causes: Sequence[str] = ()
    rank: int | None = None
    op: str | None = None  # of a collective
    exact: bool = False  # the right class, and nothing broader
    also: Callable[[dict], list] | None = None  # further problems of the verdict's JSON

    def __str__(self):
        parts = [self.outcome]
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        parts += ["|".join(part) for part in (self.kernel, self.causes) if part]
        return ", ".join(parts + ([self.op] if self.op else []))

    def problems(self, verdict: dict):
        if verdict["verdict"] != self.outcome:
            return [f"{verdict['verdict']} ({verdict['reason']}), expected {self.outcome}"]
        first, found = verdict["first"] or {}, []
        for name in ("step", "rank"):
            wanted = getattr(self, name)
            if wanted is not None and first.get(name) != wanted:
                found.append(f"{name} {first.get(name)}, expected {wanted}")
        names = " ".join(str(first.get(name) or "") for name in ("kernel", "op", "tensor", "layer"))
        if self.kernel and not one_of(self.kernel, names):
            found.append(f"kernel {first.get('kernel')}, expected {' or '.join(self.kernel)}")
        if self.op and not one_of([self.op], names):
            found.append(f"op {first.get('op')}, expected {self.op}")
        if self.causes and not self.accepts(verdict["cause"]):
            found.append(f"class {verdict['cause']['class']}, expected {' or '.join(self.causes)}")
        return found + (self.also(verdict) if self.also else [])

    def accepts(self, cause: dict):
        if self.exact:
            return cause["class"] == self.causes[0]
        if cause["class"] in self.causes:
            return True
        return cause["class"] in BROAD and self.causes[0] in cause["class_candidates"]


class Workplace:
    """The folder of one case, and the commands that run in it."""

    def __init__(self, build: pathlib.Path, folder: pathlib.Path):
        self.build, self.folder = build, folder
        self.forkpoint = build / "forkpoint"
        self.runs = {}  # name: how its recording ended
        self.verdict = None
        folder.mkdir(parents=True)

    def environment(self, changes: dict):
        environment = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        caches = {"TRITON_CACHE_DIR": self.folder / "triton", "TORCHINDUCTOR_CACHE_DIR": self.folder / "inductor"}
        return environment | SETTINGS | {name: str(path) for name, path in caches.items()} | changes

    def run(self, command: list, changes: dict | None = None, timeout_s: float = TIMEOUT_S):
        """Any command; its process group is ended when it takes too long."""
        words = [str(word) for word in command]
        job = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self.environment(changes or {}),
            start_new_session=True,
        )
        try:
            stdout, stderr = job.communicate(timeout=timeout_s)
            return Done(words, job.returncode, stdout, stderr)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            stdout, stderr = job.communicate()
            return Done(words, None, stdout, stderr)

    def record(self, name: str, command: list, options: Sequence = (), changes: dict | None = None, step_on="^step$",
               level="launch"):
        run = self.folder / name
        marks = ["--step-on", step_on] if step_on else []
        words = ["record", "--level", level, *marks, *options, "-o", run]
        done = self.run([self.forkpoint, *words, "--", *command], changes)
        self.runs[name] = done
        return done

    def record_whole(self, name: str, command: list, options: Sequence = (), changes: dict | None = None, **marks):
        done = self.record(name, command, options, changes, **marks)
        if done.status != 0:
            raise Trouble(f"recording {name} ended with status {done.status}")
        return done

    def diff(self, a: str, b: str):
        """The verdict's JSON, with its first line as "headline"."""
        runs = [self.folder / a, self.folder / b]
        done = self.run([self.forkpoint, "diff", *runs, "--json"])
        text = self.run([self.forkpoint, "diff", *runs]).stdout
        try:
            self.verdict = json.loads(done.stdout)
        except ValueError:
            raise Trouble(f"diff ended with status {done.status} and no JSON: {done.stderr.strip()}") from None
        self.verdict["headline"] = text.splitlines()[0] if text else "(no text)"
        statuses = {"identical": 0, "diverged": 1, "incomparable": 2}
        if statuses.get(self.verdict["verdict"]) != done.status:
            raise Trouble(f"diff says {self.verdict['verdict']} and ends with status {done.status}")
        return self.verdict

    def show(self, name: str, *options):
        """The JSON of `forkpoint show`."""
        done = self.run([self.forkpoint, "show", self.folder / name, *options, "--json"])
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise Trouble(f"show {name} ended with status {done.status}: {done.stderr.strip()}") from None

    def report(self):
        """All that helps to find out why a case failed."""
        parts = []
        for name, done in self.runs.items():
            lines = done.stderr.splitlines()
            stderr = "\n".join(lines if len(lines) < 80 else [*lines[:50], "...", *lines[-25:]])
            parts.append(f"-- recording {name}: status {done.status}, {' '.join(done.command)}")
            parts.append(f"{done.stdout[-1500:]}\n{stderr}")
        if self.verdict:
            parts.append("-- verdict\n" + json.dumps(self.verdict, indent=1))
        for name in self.runs:
            overview = self.run([self.forkpoint, "show", self.folder / name])
            parts.append(f"-- show {name}\n{overview.stdout}{overview.stderr}")
        return "\n".join(parts)

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclasses.dataclass
class Case:
    name: str
    play: Callable[[Workplace], tuple]  # gives what was found, in a line, and a list of what is wrong with it
    expected: str
    gpus: int = 1
    modules: Sequence[str] = ("torch", "triton")  # of Python's, that its programs need
    alone: bool = False  # takes all of a GPU's memory: no other case can run beside it


def describe(verdict: dict):
    cause = verdict["cause"]
    among = f" (of {', '.join(cause['class_candidates'])})" if cause["class"] in BROAD else ""
    return verdict["headline"] + (f"; class {cause['class']}{among}" if verdict["first"] else "")


def python(program: str, *arguments, flags: Sequence = ()):
    return [sys.executable, *flags, PROGRAMS / f"{program}.py", *arguments]


def torchrun(program: str, *arguments, ranks=2):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [sys.executable, *launcher, PROGRAMS / f"{program}.py", *arguments]


def count_gpus():
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
