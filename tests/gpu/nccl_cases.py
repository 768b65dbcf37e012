"""Cases of nccl_program: every collective of NCCL on two GPUs, in one process, in threads and in two processes.

Each is recorded twice at one level: the recording must hold each call as the program says that it made it, both must be
identical, and a value that is altered on one rank must be named there.
"""

import collections
import dataclasses
import itertools
import pathlib
import re
import shutil

from case_driver import PROGRAMS, Case, Expected, Trouble, Workplace, describe

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 3
ALTERED_RANK, ALTERED_STEP = 1, 1
# As forkpoint calls the program's communicators: by their size, in the order in which they were made.
ONE_PROCESS = {"world": "nccl 1 of 2 ranks", "configured": "nccl 2 of 2 ranks", "scalable": "nccl 3 of 2 ranks"}
TWO_PROCESSES = {"world": "world", "configured": "world 2", "scalable": "world 3"}


@dataclasses.dataclass
class Arrangement:
    name: str
    words: tuple  # of the program's command line
    launcher: str = ""  # of two processes; empty: there is one
    ordered: bool = True  # its threads set up, and call, in one order

    def command(self, place: Workplace, *more):
        launch = ["bash", HERE / "two_ranks.sh", self.launcher] if self.launcher else []
        return [*launch, place.build / "tests" / "nccl_program", *self.words, "--steps", STEPS, *more]

    def process_of(self, rank: int):
        return rank if self.launcher else 0

    def communicator(self, name: str, rank: int):
        names = TWO_PROCESSES if self.launcher else ONE_PROCESS
        splits = {"reversed": (1, "world"), "alone": (2, "world"), "late": (1, "configured")}
        if name not in splits:
            return names[name]
        number, parent = splits[name]
        if self.launcher:
            return f"split {number} of {names[parent]}"
        colour = rank if name == "alone" else 0  # one process may get several children of a split
        return f"split {number} ({colour}) of {names[parent]}"

    def tensor(self, name: str, communicator: str, rank: int):
        """As it is called in the records: with its place in front where the process has several."""
        if self.launcher or communicator == "alone":
            return name
        return f"rank {1 - rank if communicator == 'reversed' else rank}: {name}"

    def altered_tensor(self, name: str):
        return self.tensor(name, "world", ALTERED_RANK)


ARRANGEMENTS = (
    Arrangement("all", ("all",)),
    Arrangement("threads", ("threads",)),
    Arrangement("raced", ("raced",), ordered=False),
    Arrangement("processes", ("ranks",), "torchrun"),
    Arrangement("openmpi", ("ranks", "--nccl-memory"), "openmpi"),
)


# ---- What the program says that it did, and what was recorded


def shape_of(text: str):
    return [int(number) for number in text.split("x")]


def add_expected(arrangement: Arrangement, line: str, tensors: dict, arguments: dict):
    """One line `call ...` of the program's."""
    step, rank, communicator, op, dtype, taken, given, root, reduction = line.split()[1:]
    rank = int(rank)
    ends = [(op, "input", taken), (op, "output", given)]
    if op == "ring":  # with two ranks the next is the one before as well; each is the other's place
        own = 1 - rank if communicator == "reversed" else rank
        peer = 0 if communicator == "alone" else 1 - own
        ends = [("send", f"input to {peer}", taken), ("recv", f"output from {peer}", given)]
    where = (int(step), arrangement.process_of(rank), arrangement.communicator(communicator, rank))
    for name, end, shape in ends:
        if shape != "-":
            tensors[(*where, name, arrangement.tensor(end, communicator, rank))].append((dtype, shape_of(shape)))
    for name, value in (("root", root), ("reduction", reduction)):
        if value != "-":
            arguments[(*where, op, arrangement.tensor(name, communicator, rank))].append(float(value))


def expected_records(arrangement: Arrangement, printed: str):
    tensors, arguments = collections.defaultdict(list), collections.defaultdict(list)
    for line in printed.splitlines():
        if line.startswith("call "):
            add_expected(arrangement, line, tensors, arguments)
    return tensors, arguments


def recorded_records(place: Workplace, run: str):
    """Communicators of one name in one process (`alone`) are told apart by a number behind it: here they are one."""
    tensors, arguments, factors = collections.defaultdict(list), collections.defaultdict(list), []
    for row in place.show(run, "--records")["records"]:
        where = (row["step"], row["rank"], re.sub(r"\[\d+\]$", "", row["communicator"]), row["op"], row["tensor"])
        if "premul.scale" in row["tensor"]:
            factors.append(row["value"] if row["kind"] == "scalar" else row["dtype"])
        elif row["kind"] == "scalar":
            arguments[where].append(row["value"])
        else:
            tensors[where].append((row["communicator"], row["call"], row["dtype"], row["shape"], row["kind"]))
    return tensors, arguments, factors


def problems_of_records(arrangement: Arrangement, place: Workplace, run: str, printed: str):
    expected, expected_arguments = expected_records(arrangement, printed)
    if len(expected) < 50:
        yield f"the program says of {len(expected)} tensors only that they went into calls"
    found, arguments, factors = recorded_records(place, run)
    for where in sorted(set(expected) | set(found), key=str):
        rows = sorted(found.get(where, []))
        if sorted(row[2:4] for row in rows) != sorted(expected.get(where, [])):
            yield f"{where}: recorded {[row[2:4] for row in rows]}, the program made {expected.get(where, [])}"
        for communicator, calls in itertools.groupby(rows, lambda row: row[0]):
            numbers = [row[1] for row in calls]
            if numbers != list(range(len(numbers))):
                yield f"{where}: the calls on {communicator} are numbered {numbers}"
        if any(row[4] != "collective" for row in rows):
            yield f"{where}: kinds {[row[4] for row in rows]}, expected collective"
    for where in sorted(set(expected_arguments) | set(arguments), key=str):
        if sorted(arguments.get(where, [])) != sorted(expected_arguments.get(where, [])):
            yield f"{where}: recorded {arguments.get(where)}, the program asked for {expected_arguments.get(where)}"
    ranks = 2 * STEPS
    if collections.Counter(factors) != {0.5: 2 * ranks, "f32": ranks}:  # two calls a step and rank, and one
        yield f"factors: {collections.Counter(factors)}, expected 0.5 {2 * ranks} times and {ranks} on the device"


def some(problems, most=10):
    problems = list(problems)
    return problems[:most] + ([f"and {len(problems) - most} more"] if len(problems) > most else [])


def problems_of_members(arrangement: Arrangement, place: Workplace, run: str):
    listed = place.run([place.build / "tests" / "list_communicators", place.folder / run])
    found = sorted(tuple(re.sub(r"\[\d+\]$", "", line).split(" ", 4)) for line in listed.stdout.splitlines())
    expected = []
    for rank in (0, 1):
        process = arrangement.process_of(rank)
        for name in ("world", "configured", "scalable", "reversed", "alone", "late"):
            spot = {"reversed": 1 - rank, "alone": 0}.get(name, rank)
            both = "0,0" if not arrangement.launcher else "1,0" if name == "reversed" else "0,1"
            members, size = (str(process), 1) if name == "alone" else (both, 2)
            expected.append((str(process), str(spot), str(size), members, arrangement.communicator(name, rank)))
    if found != sorted(expected):
        yield f"communicators {found}, expected {sorted(expected)} {listed.stderr}"


# ---- Altered values


def by_the_program(arrangement: Arrangement, what: str, level: str):
    """What must be named when a kernel of the program's alters an input or an output."""
    rank = arrangement.process_of(ALTERED_RANK)
    if level == "launch":
        return Expected(step=ALTERED_STEP, rank=rank, kernel=(f"alter_{what}",))
    # Between two records nobody looks: what is altered behind the first all-reduce shows as the next one's input.
    named = names_tensor(arrangement.altered_tensor("input"))
    return Expected(step=ALTERED_STEP, rank=rank, op="all_reduce", also=named)


def names_tensor(tensor: str):
    def also(verdict):
        found = verdict["first"]["tensor"]
        return [] if found == tensor else [f"tensor {found}, expected {tensor}"]

    return also


def problems_of_altered(arrangement: Arrangement, place: Workplace, level: str):
    for what in ("input", "output"):
        words = (f"--alter-{what}", f"{ALTERED_RANK}:{ALTERED_STEP}")
        place.record_whole(f"altered_{what}", arrangement.command(place, *words), level=level)
        verdict = place.diff("a", f"altered_{what}")
        expected = by_the_program(arrangement, what, level)
        yield from (f"altered {what}: {problem} ({describe(verdict)})" for problem in expected.problems(verdict))


def build_shim(place: Workplace):
    shim = place.folder / "altered_nccl.so"
    compiler = shutil.which("cc") or "gcc"
    compiled = place.run([compiler, "-shared", "-fPIC", "-O2", PROGRAMS / "altered_nccl.c", "-o", shim])
    if compiled.status != 0:
        raise Trouble(f"the shim does not compile: {compiled.stderr}")
    return shim


def problems_of_shim(arrangement: Arrangement, place: Workplace, level: str):
    """The result of the altered step's first all-reduce is overwritten between NCCL and the recording."""
    process = arrangement.process_of(ALTERED_RANK)
    before = [
        row
        for row in place.show("a", "--records", "--ranks", process)["records"]
        if row["op"] == "all_reduce" and row["role"] == "output" and row["step"] < ALTERED_STEP
    ]
    call = len(before) + (1 if arrangement.launcher else 2)  # in one process rank 0 calls first
    changes = {"ALTERED_RANK": str(process), "ALTERED_CALL": str(call)}
    if not arrangement.launcher:
        changes |= {"RANK": "0", "WORLD_SIZE": "1"}
    preload = f"{place.build / 'libforkpoint.so'}:{build_shim(place)}"  # in this order: the probe calls the shim
    command = ["env", f"LD_PRELOAD={preload}", *arrangement.command(place, "--unverified")]
    place.record_whole("shim", command, level=level, changes=changes)
    verdict = place.diff("a", "shim")
    expected = Expected(
        step=ALTERED_STEP, rank=process, op="all_reduce", also=names_tensor(arrangement.altered_tensor("output"))
    )
    problems = expected.problems(verdict)
    if verdict["first"] and verdict["first"]["kind"] != "collective":
        problems.append(f"kind {verdict['first']['kind']}, expected collective")
    yield from (f"altered behind NCCL: {problem} ({describe(verdict)})" for problem in problems)


# ---- The cases


def problems_of_verdict(arrangement: Arrangement, verdict: dict):
    if verdict["verdict"] == "identical":
        return
    # Threads that race each other to the driver leave their allocations and streams in any order.
    if not arrangement.ordered and verdict["verdict"] == "incomparable":
        return
    yield f"twice: {describe(verdict)}, expected identical ({verdict['reason']})"


def case(arrangement: Arrangement, level: str, altered: bool):
    def play(place: Workplace):
        if not (place.build / "tests" / "nccl_program").exists():
            raise Trouble("nccl_program was not built: NCCL or NVTX was not found")
        plain = place.run(arrangement.command(place))
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded, with status {plain.status}: {plain.stderr[-2000:]}")
        problems = []
        for run in "ab":
            done = place.record_whole(run, arrangement.command(place), level=level)
            if done.stdout != plain.stdout:
                problems.append(f"run {run} prints something else than unrecorded")
            problems += [f"run {run} says: {line}" for line in done.complaints()]
        verdict = place.diff("a", "b")
        problems += problems_of_verdict(arrangement, verdict)
        problems += some(problems_of_records(arrangement, place, "a", plain.stdout))
        problems += problems_of_members(arrangement, place, "a")
        problems += [f"a gap: {gap}" for gap in place.show("a")["gaps"]]
        if altered:
            problems += problems_of_altered(arrangement, place, level)
        if altered and arrangement.name != "threads":  # there the shim would count calls of both
            problems += problems_of_shim(arrangement, place, level)
        return describe(verdict), problems

    expected = "identical, every call recorded" + (", altered values named" if altered else "")
    return Case(f"nccl_{arrangement.name}_{level}", play, expected, gpus=2, modules=())


def dormant():
    """Preloaded, and nothing recorded: NCCL's results and the program's output are what they are without the probe."""
    arrangement = ARRANGEMENTS[3]

    def play(place: Workplace):
        plain = place.run(arrangement.command(place))
        preloaded = place.run(arrangement.command(place), {"LD_PRELOAD": str(place.build / "libforkpoint.so")})
        same = (plain.status, plain.stdout, plain.stderr) == (preloaded.status, preloaded.stdout, preloaded.stderr)
        good = same and plain.status == 0
        problems = [] if good else [f"{plain.status} and {preloaded.status}: {preloaded.stderr[-500:]}"]
        return f"status {preloaded.status}", problems

    return Case("nccl_dormant", play, "the same as without the probe", gpus=2, modules=())


def all_cases():
    altered = ("all", "threads", "processes")
    cases = [case(one, level, one.name in altered) for one in ARRANGEMENTS for level in ("step", "launch")]
    return [*cases, dormant()]
