"""`record --ops`: the framework ops inside of the layers that are named, forward and backward; what recording them changes
(nothing), and the op that a planted fault is traced to."""
import collections
import json
import tempfile

from bridge_driver import FORKPOINT, diff, place, record, run, the_results_are_the_same

OPS = ("--ops", "*")


def show(folder, step=1):
    return json.loads(run([FORKPOINT, "show", folder, "--steps", step, "--json"]).stdout)


def ops_of(folder, step=1):
    """{(phase, layer, op): [record]}; phases are `eval` and `recompute` where the flags say so."""
    found = collections.defaultdict(list)
    for r in show(folder, step)["records"]:
        phase = "eval" if r["eval"] else "recompute" if r["recompute"] else r["phase"]
        if r["op"]:
            found[phase, r["layer"], r["op"]].append(r)
    return found


def expect_ops(folder):
    found = ops_of(folder)
    for phase, layer, op, tensors in [
        ("forward", "blocks.0.expert", "aten::addmm#0", "mat1 mat2 output self"),
        ("forward", "blocks.0", "aten::mul_.Tensor#0", "other output self"),
        ("forward", "blocks.0", "aten::transpose.int#1", "dim0 dim1 output self"),
        ("forward", "blocks.0.combine", "aten::index_add#0", "dim index output self source"),
        ("forward", "blocks.0.drop", "aten::bernoulli_.float#0", "cpu.rng output p"),
        ("forward", "blocks.0.drop", "aten::empty_like#0", "self"),
        ("forward", "blocks.0.noise", "aten::empty.memory_format#0", "arguments pin_memory"),
        ("forward", "blocks.0.noise", "aten::slice.Tensor#1", "dim end output start"),  # the half that was written
        ("forward", "blocks.0.noise", "aten::mul.Tensor#0", "other output self"),
        ("forward", "tok", "aten::embedding#0", "indices output weight"),
        ("forward", "head", "aten::_to_copy#0", "arguments output self"),  # of autocast
        ("eval", "blocks.1.combine", "aten::index_add#0", "dim index output self source"),
        ("recompute", "blocks.1.combine", "aten::index_add#0", "dim index output self source"),
        ("backward", "blocks.0.expert", "aten::mm#0", "mat2 output self"),
        ("backward", "blocks.1.expert", "aten::mm#0", "mat2 output self"),
        ("backward", "blocks.0.combine", "aten::index_select#0", "dim index output self"),
        ("backward", "tok", "aten::embedding_dense_backward#0",
         "grad_output indices num_weights output padding_idx scale_grad_by_freq"),
        # An auxiliary loss is no output of its layer.
        ("backward", "blocks.0", "aten::tanh_backward#0", "grad_output output"),
        # Its formula is another where a dispatch mode is entered: one op, not looked into.
        ("backward", "Model", "CumprodBackward0#0", "grad_input grad_output"),
    ]:
        rows = found.get((phase, layer, op))
        assert rows, f"no {phase} {layer} {op}; found:\n" + "\n".join(map(str, found))
        names = {r["tensor"] for r in rows}
        wanted = set(tensors.split())
        assert names == wanted, f"{phase} {layer} {op}: found {sorted(names)}, expected {sorted(wanted)}"
        twice = [r for r in rows if r["call"] > (phase == "recompute")]
        assert not twice, f"recorded twice: {twice}"
    of_combine = [op for phase, layer, op in found if phase == "forward" and layer == "blocks.0.combine"]
    assert sorted(of_combine) == ["aten::index_add#0", "aten::zeros#0"], of_combine
    assert not [key for key in found if "empty" in key[2] and any(r["role"] == "output" for r in found[key])]


FAULTS = {
    "order@1": (1, "forward", "blocks.1.combine", "output", "aten::index_add#0"),
    "backward@1": (1, "backward", "tok", "output", "aten::embedding_dense_backward#0"),
    "scale@2": (2, "forward", "blocks.0", "other", "aten::mul_.Tensor#0"),
    "masks@1": (1, "forward", "blocks.1.drop", "cpu.rng", "aten::bernoulli_.float#0"),
}


def main():
    with tempfile.TemporaryDirectory() as folder:
        the_results_are_the_same(f"{folder}/good", "ops_moe.py", options=OPS)
        expect_ops(f"{folder}/good")
        record(f"{folder}/same", "ops_moe.py", options=OPS)
        verdict = diff(f"{folder}/good", f"{folder}/same")
        assert verdict["verdict"] == "identical", (place(verdict), verdict["reason"], verdict["gaps"])
        for fault, (step, phase, layer, tensor, op) in FAULTS.items():
            record(f"{folder}/{fault}", "ops_moe.py", "--fault", fault, options=OPS)
            verdict = diff(f"{folder}/good", f"{folder}/{fault}")
            found = (*place(verdict)[1:], (verdict["first"] or {}).get("op"))
            assert found == (step, phase, layer, tensor, op), f"{fault}: found {found}"
            causes = verdict["cause"]["class_candidates"] + [verdict["cause"]["class"]]
            assert ("nondeterministic_op" in causes or "unordered_accumulation" in causes) == (tensor == "output"), (
                fault, verdict["cause"])

        record(f"{folder}/some", "ops_moe.py", options=("--ops", "blocks.1.c*,tok,blocks.0"))
        layers = {layer for _, layer, _ in ops_of(f"{folder}/some")}
        inside = {f"blocks.0{part}" for part in ("", ".expert", ".combine", ".drop", ".noise")}
        assert layers == {"blocks.1.combine", "tok"} | inside, layers

        # What shares a process has models of its own.
        for i, cases in enumerate(["compiled compiled_part", "views_and_in_place own_function exceptions threads transforms"]):
            the_results_are_the_same(f"{folder}/{i}", "bridge_cases.py", *cases.split(), options=OPS)
        for kind in "reentrant", "nonreentrant":
            the_results_are_the_same(f"{folder}/{kind}", "bridge_checkpoint.py", kind, options=OPS)
        the_results_are_the_same(f"{folder}/gpt", "bridge_gpt.py", "--steps", "3", options=OPS)
    print("ops are recorded inside of the layers that are named, and the faults in them are traced to them")


if __name__ == "__main__":
    main()
