"""Deterministic mode in PyTorch programs whose fault is known: diverged without the knob, identical with it, and what is said."""
import json
import pathlib
import sys
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, diff, run

count = 0


def record(folder, faults, options=(), **more):
    """The folder of the run, and what was said."""
    global count
    count += 1
    path = pathlib.Path(folder, f"{count}")
    command = [sys.executable, PROGRAMS / "unrepeatable.py", *faults]
    done = run(["env", "-u", "PYTHONHASHSEED", "-u", "CUBLAS_WORKSPACE_CONFIG", *(f"{k}={v}" for k, v in more.items()),
                FORKPOINT, "record", "--level", "step", "--first-step", "0", *options, "-o", path, "--", *command])
    assert done.status == 0, f"{faults} {options}: status {done.status}: {done.stderr[-3000:]}"
    return path, done


def verdict(folder, faults, options=()):
    return diff(record(folder, faults, options)[0], record(folder, faults, options)[0])["verdict"]


def shown(path):
    return json.loads(run([FORKPOINT, "show", path, "--json"]).stdout)


def cured(folder, fault, knob):
    assert verdict(folder, [fault]) == "diverged", f"{fault} repeats without any knob"
    assert verdict(folder, [fault], ["--deterministic=" + knob]) == "identical", f"{fault} does not repeat with {knob}"


def mends_what_it_is_for(folder):
    for fault, knob in (("empty", "torch-fill"), ("set", "python-hash"), ("unseeded", "seeds")):
        cured(folder, fault, knob)
    # And nothing else.
    found = verdict(folder, ["empty"], ["--deterministic=torch-algorithms,python-hash,seeds"])
    assert found == "diverged", found
    found = verdict(folder, ["set"], ["--deterministic=-python-hash"])
    assert found == "diverged", found
    found = verdict(folder, ["unseeded", "set", "empty"], ["--deterministic=+torch-fill"])
    assert found == "identical", found


def leaves_a_seeded_program_as_it_is(folder):
    seeded = ["--deterministic=seeds"]
    assert diff(record(folder, [])[0], record(folder, [], seeded)[0])["verdict"] == "identical"


def names_ops_without_implementation(folder):
    path, done = record(folder, ["put"], ["--deterministic"])
    assert "not deterministic: put_" in shown(path)["coverage_limits"], shown(path)["coverage_limits"]
    assert "not deterministic: put_" in done.stderr, done.stderr
    assert "does not have a deterministic implementation" not in done.stderr, done.stderr
    # Warnings that are errors are the program's own affair, and not where it is we who asked.
    path, done = record(folder, ["put", "error"], ["--deterministic"])
    assert "not deterministic: put_" in done.stderr, done.stderr
    path, done = record(folder, [], ["--deterministic"])
    assert "not deterministic" not in done.stderr, done.stderr
    # What is said of one run only forbids nothing.
    assert diff(record(folder, ["put"])[0], record(folder, ["put"], ["--deterministic=torch-algorithms"])[0])["verdict"] == "identical"


def lets_the_program_have_its_way(folder):
    for fault, state in (([], "True True fill False"), (["strict"], "True False fill True"), (["off"], "False False fill True")):
        path, done = record(folder, fault, ["--deterministic"])
        assert f"deterministic {state}\n" in done.stdout, (fault, done.stdout)
        versions = shown(path)["manifest"]["versions"]
        said = versions.get("deterministic.set_by_program", "")
        assert ("use_deterministic_algorithms" in said) == bool(fault), versions
        assert "torch-algorithms" in versions["deterministic.in_process"], versions
    path, done = record(folder, [])
    assert "deterministic False False fill True\n" in done.stdout and "deterministic.in_process" not in shown(path)["manifest"]["versions"]
    path, done = record(folder, [], ["--deterministic"], CUBLAS_WORKSPACE_CONFIG=":0:0")
    assert "The knob cublas is not in force: CUBLAS_WORKSPACE_CONFIG=:0:0 is set" in done.stderr, done.stderr
    assert shown(path)["manifest"]["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    # A rank that is not recorded has to repeat as well.
    path, done = record(folder, [], ["--deterministic", "--ranks", "1"], RANK="0", WORLD_SIZE="2")
    assert "deterministic True True" in done.stdout, done.stdout


def reads_what_floats_are_multiplied_in(folder):
    path, done = record(folder, ["tf32", "error"], ["--deterministic"])
    found = shown(path)
    assert not found["gaps"], found["gaps"]
    assert "bridge failed" not in done.stderr and "Warning" not in done.stderr, done.stderr
    precision = {name: text for name, text in found["manifest"]["versions"].items() if "precision" in name or "float32" in name}
    assert precision == {"torch.float32_matmul": "high", "torch.matmul.fp32_precision": "tf32", "torch.cudnn.conv.fp32_precision": "tf32",
                         "torch.cudnn.rnn.fp32_precision": "ieee"}, precision


def prices_a_script(folder):
    out = pathlib.Path(folder, "price")
    done = run(["env", "-u", "PYTHONHASHSEED", FORKPOINT, "price", "-o", out, "--steps", "1:3", "--rounds", "2", "--json", "--skip-alone",
                "--deterministic=cublas,python-hash,torch-fill", "--", sys.executable, PROGRAMS / "unrepeatable.py", "set"])
    assert done.status == 0, done.stdout + done.stderr
    priced = json.loads(done.stdout)
    assert priced["cheapest"]["knobs"] == ["python-hash"], priced
    assert all(arm["step_ms"] > 0 for arm in priced["arms"]), priced


if __name__ == "__main__":
    for test in (mends_what_it_is_for, leaves_a_seeded_program_as_it_is, names_ops_without_implementation,
                 lets_the_program_have_its_way, reads_what_floats_are_multiplied_in, prices_a_script):
        with tempfile.TemporaryDirectory() as place:
            test(place)
        print(test.__name__, flush=True)
