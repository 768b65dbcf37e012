"""Jobs that run with the probe asleep, and what `forkpoint` says of them."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

BUILD = pathlib.Path(os.environ["FORKPOINT_BUILD"])
FORKPOINT = str(BUILD / "forkpoint")
PROBE = str(BUILD / "libforkpoint.so")
MINIGPT = str(BUILD / "samples" / "minigpt")
TRAINER = str(BUILD / "tests" / "forkpoint_tiny_trainer")
PATIENCE = 60


class Place:
    """A folder for runs and one for the sockets of this test's jobs, so that no other job of the machine is seen."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="forkpoint-attach-")
        self.path = pathlib.Path(self._folder.name)
        self.sockets = self.path / "sockets"
        self.jobs = []

    def environment(self, **more):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FORKPOINT_") and k not in ("LD_PRELOAD", "RANK", "WORLD_SIZE")}
        return {**kept, "FORKPOINT_SOCKETS": str(self.sockets), "NO_COLOR": "1", **more}

    def run(self, *words, timeout=PATIENCE, **more):
        return subprocess.run([FORKPOINT, *map(str, words)], capture_output=True, text=True, timeout=timeout,
                              env=self.environment(**more), cwd=self.path)

    def start(self, *words, **more):
        """Under the probe, asleep."""
        with open(self.path / "stderr", "ab") as stderr:
            job = subprocess.Popen([*map(str, words)], env=self.environment(LD_PRELOAD=PROBE, **more), cwd=self.path,
                                   stdout=subprocess.DEVNULL, stderr=stderr)
        self.jobs.append(job)
        return job

    def start_trainers(self, ranks=4, pause=5, steps=10_000_000):
        """Ranks that do not wait for each other."""
        jobs = [self.start(TRAINER, steps, "--pause", pause, RANK=str(r), WORLD_SIZE=str(ranks)) for r in range(ranks)]
        self.await_ranks(ranks)
        return jobs

    def start_minigpt(self, ranks=4, steps=10_000_000, *options):
        job = self.start(MINIGPT, "--ranks", ranks, "--steps", steps, "--layers", 1, "--dim", 8, "--heads", 1, "--seq", 8, "--batch", 1,
                         "--threads", 1, "--seed", 3, *options)
        self.await_ranks(ranks)
        return job

    def ps(self):
        done = self.run("ps", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def await_ranks(self, ranks):
        return self.await_(lambda: [j for j in self.ps() if j["step"] is not None], lambda jobs: len(jobs) == ranks,
                           f"{ranks} ranks that have begun a step")

    def await_(self, look, is_it, what):
        deadline = time.monotonic() + PATIENCE
        while True:
            seen = look()
            if is_it(seen):
                return seen
            assert time.monotonic() < deadline, f"waited in vain for {what}; seen: {seen}; stderr of the job: {self.stderr()}"
            time.sleep(0.05)

    def stderr(self):
        path = self.path / "stderr"
        return path.read_text()[-2000:] if path.exists() else ""

    def attach(self, *options, run="run", **more):
        return self.run("attach", "--all", "-o", run, *options, **more)

    def attach_in_background(self, *options, run="run", state="recording"):
        job = subprocess.Popen([FORKPOINT, "attach", "--all", "-o", run, *map(str, options)], env=self.environment(), cwd=self.path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.jobs.append(job)
        self.await_(self.ps, lambda jobs: jobs and all(j["state"] == state for j in jobs), f"all ranks {state}")
        return job

    def shown(self, run):
        done = self.run("show", run, "--json")
        assert done.returncode == 0, f"show {run}: {done.stderr}"
        return json.loads(done.stdout)

    def steps_of(self, run):
        """{rank: (first, last, how many whole ones, state of its stream)}"""
        return {r["rank"]: (r["first_step"], r["last_step"], r["complete_steps"], r["state"]) for r in self.shown(run)["ranks"]}

    def manifest(self, run):
        return json.loads((self.path / run / "run.json").read_text())

    def close(self):
        for job in self.jobs:
            if job.poll() is None:
                job.send_signal(signal.SIGCONT)
                job.kill()
                job.wait()
            for pipe in (job.stdout, job.stderr):
                if pipe:
                    pipe.close()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def threads_of(pid):
    names = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return sorted(names)


def descriptors_of(pid):
    return len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


def settled(look):
    """The least of several looks: a connection that is being closed is not one that stays."""
    seen = []
    for _ in range(20):
        seen.append(look())
        time.sleep(0.02)
    return min(seen)


def resident_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0
