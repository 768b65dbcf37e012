"""`forkpoint bisect` on a PyTorch script that nobody edited: sums that are added up in another order are found, down to the op
and its operands, without a checkpoint and without anybody having said in which layer to look."""
import json
import tempfile

from bridge_driver import FORKPOINT, command_of, place, record, run

PROGRAM = "ops_moe.py"


def bisect(folder, *arms):
    done = run([FORKPOINT, "bisect", "--json", "-o", folder, *arms])
    assert done.status == 1, f"{arms}: status {done.status}: {done.stdout}{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def expect(found, step, phase, layer, op, windows):
    assert place(found) == ("diverged", step, phase, layer, "output"), place(found)
    assert found["first"]["op"] == op, found["first"]
    assert found["bisect"]["windows"] == windows, found["bisect"]
    # What went in is equal, element by element; what came out is not.
    operands = found["bisect"]["operands"]
    output = [line for line in operands if f"({op}): output" in line]
    others = [line for line in operands if f"({op}): " in line and line not in output]
    assert [line for line in output if "differ" in line and "ulp" in line], operands
    assert others and not [line for line in others if "differ" in line], operands


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Rounding hides this one before it reaches a weight: the runs are finer than level step.
        record(f"{folder}/good", PROGRAM, "--steps", "2")
        record(f"{folder}/bad", PROGRAM, "--steps", "2", "--fault", "order@1")
        found = bisect(f"{folder}/order", f"{folder}/good", f"{folder}/bad")
        expect(found, 1, "forward", "blocks.1.combine", "aten::index_add#0", 4)
        good = " ".join(map(str, command_of(PROGRAM, "--steps", 3)))
        found = bisect(f"{folder}/backward", "--steps", "0:2", "--good", good, "--bad", f"{good} --fault backward@1")
        expect(found, 1, "backward", "tok", "aten::embedding_dense_backward#0", 6)
        # What a module computes by itself, between the layers inside of it.
        good = " ".join(map(str, command_of("bridge_gpt.py", "--steps", 3)))
        found = bisect(f"{folder}/around", "--steps", "0:2", "--good", good, "--bad", f"{good} --fault share@1")
        assert place(found) == ("diverged", 1, "forward", "blocks.1", "output") and found["first"]["op"] == "aten::add.Tensor#0", found["first"]
    print("sums that are added up in another order are bisected to the op, and its operands say so")
