"""`forkpoint check` on a PyTorch script that nobody edited: a reference is made, met, and missed by a changed weight."""
import pathlib
import tempfile
import xml.etree.ElementTree

from bridge_driver import FORKPOINT, command_of, run

COMMAND = command_of("replayed.py")
runs = 0


def check(reference, *arguments, options=(), **environment):
    global runs
    runs += 1
    command = [FORKPOINT, "check", "--reference", reference, "-o", f"{reference}.run{runs}", *options, "--", *COMMAND, *arguments]
    return run(command, **environment)


def cases(path):
    suite = xml.etree.ElementTree.parse(path).getroot().find("testsuite")
    return {case.get("name"): case[0].tag if len(case) else "passed" for case in suite.findall("testcase")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        reference = pathlib.Path(folder, "mlp.json")
        junit = f"{folder}/junit.xml"
        made = check(reference, options=("--steps", "8", "--update"))
        assert made.status == 0, made.stderr
        text = reference.read_text()
        for part in '"torch": "2.', '"layer":"3","tensor":"weight"', '"tensor":"weight.exp_avg"', '"loss_value":"0.', '"device": ':
            assert part in text, f"no {part} in the reference: {text[:3000]}"

        same = check(reference, options=("--junit", junit))
        assert same.status == 0 and same.stdout.startswith("identical: "), same.stdout + same.stderr
        found = cases(junit)
        assert {found[g] for g in ("loss", "gradients", "parameters", "optimizer state")} == {"passed"}, found

        fault = check(reference, "--fault", "5", options=("--junit", junit))
        assert fault.status == 1, fault.stdout + fault.stderr
        assert fault.stdout.splitlines()[0] == "diverged at step 5, rank 0, loss", fault.stdout
        assert "3: weight" in fault.stdout, fault.stdout
        assert cases(junit)["parameters"] == "failure" and cases(junit)["data"] == "passed", cases(junit)

        # The number of threads is something that the digests depend on: what differs then has not diverged.
        other = check(reference, "--fault", "5", OMP_NUM_THREADS="2")
        assert other.status == 2 and "OMP_NUM_THREADS is 1 in the reference, 2 here" in other.stdout, other.stdout + other.stderr
    print("a reference is met by the same training and missed by a changed one")
