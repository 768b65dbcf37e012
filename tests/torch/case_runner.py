"""Runs cases side by side: BUILD [--only SUBSTRING] [--jobs N] [--time-limit SECONDS] [--keep FOLDER] [--list].

Prints a line a case, `pass|FAIL|skip NAME: verdict (expected ...)`, and at the end `N passed, N failed, N skipped`.
Exits with 1 when a case failed.
"""

import argparse
import concurrent.futures
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

from case_driver import Case, Trouble, Workplace, count_gpus


def missing(case: Case, gpus: int):
    """Why this machine cannot run the case; empty: it can."""
    if gpus < case.gpus:
        return f"needs {case.gpus} GPU(s), found {gpus}"
    absent = [name for name in case.modules if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(absent)} here" if absent else ""


def takes_all(case: Case):
    """JAX takes three quarters of a GPU's memory at its start. Such cases come last, one by one."""
    return case.alone or "jax" in case.modules


def processes_on_gpus():
    asked = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,used_memory,pid,name", "--format=csv"]
    said = subprocess.run(asked, capture_output=True, text=True)
    return "-- processes on the GPUs\n" + said.stdout + said.stderr


def run(case: Case, build: pathlib.Path, folder: pathlib.Path, keep: bool, deadline: float):
    """The lines to print, the first of which begins with pass or FAIL."""
    place = Workplace(build, folder / case.name)
    try:
        if time.monotonic() > deadline:
            raise Trouble("not started: the time is up")
        found, problems = case.play(place)
    except Trouble as trouble:
        found, problems = "no verdict", [str(trouble)]
    except Exception:  # of this test's: the other cases go on
        found, problems = "no verdict", [traceback.format_exc()]
    lines = [f"{'FAIL' if problems else 'pass'} {case.name}: {found} (expected {case.expected})"]
    if problems:
        report = place.report()
        lines += [f"     {problem}" for problem in problems] + [report]
        if "out of memory" in report + str(problems):  # which of the cases beside this one holds it?
            lines.append(processes_on_gpus())
    if not keep:
        place.remove()
    return lines


def main(all_cases):
    """The command line of a list of cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    parser.add_argument("--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)), help="cases at a time")
    parser.add_argument("--time-limit", type=float, default=3600, metavar="SECONDS", help="starts no case after it")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="leave the runs in this new folder")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    cases = sorted((case for case in all_cases if options.only in case.name), key=takes_all)
    if options.list or not cases:
        print("\n".join(case.name for case in cases) or f"no case has {options.only} in its name")
        sys.exit(0 if cases else 1)
    gpus, counts = count_gpus(), {"pass": 0, "FAIL": 0, "skip": 0}
    deadline = time.monotonic() + options.time_limit
    with tempfile.TemporaryDirectory(prefix="forkpoint-cases-") as temporary:
        folder = (options.keep or pathlib.Path(temporary)).resolve()
        build = options.build.resolve()
        for one_by_one, together in itertools.groupby(cases, key=takes_all):
            with concurrent.futures.ThreadPoolExecutor(1 if one_by_one else options.jobs) as pool:
                results = [
                    [f"skip {case.name}: {missing(case, gpus)}"]
                    if missing(case, gpus)
                    else pool.submit(run, case, build, folder, bool(options.keep), deadline)
                    for case in together
                ]
                for result in results:
                    lines = result if isinstance(result, list) else result.result()
                    counts[lines[0][:4]] += 1
                    print("\n".join(lines), flush=True)
    print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(1 if counts["FAIL"] else 0)

