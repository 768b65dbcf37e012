"""Parameters that a module's own pre-hook brings in, and gradients that the optimizer's own does, are recorded behind these
hooks: equal runs are identical, whatever memory held before, and a difference in them is named before what comes of it. And
before forward(), which may write them itself."""
import tempfile

from bridge_driver import diff, place, record, rows, the_results_are_the_same

PROGRAM = "late_parameters.py"
FAULTS = {"position": (2, "forward", "Model", "position"), "weight": (2, "forward", "reduced", "weight"),
          "gradient": (2, "optimizer", "reduced", "weight.grad"), "observed": (2, "forward", "observed", "output")}
OPTIONS = {"layers": (), "ops": ("--ops", "*")}


def expect(found, expected, what):
    assert found == expected, f"{what}: found {found}, expected {expected}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        the_results_are_the_same(f"{folder}/hooks", PROGRAM, "hooks")
        the_results_are_the_same(f"{folder}/good", PROGRAM)
        for kind, options in OPTIONS.items():
            record(f"{folder}/{kind}.a", PROGRAM, options=options)
            record(f"{folder}/{kind}.b", PROGRAM, options=options)
            verdict = diff(f"{folder}/{kind}.a", f"{folder}/{kind}.b")
            expect((place(verdict)[0], verdict["gaps"]), ("identical", []), f"equal runs with {kind} ({verdict['reason']})")
        held = {name for name in rows(f"{folder}/good", 2) if name.startswith("forward")}
        for layer, tensors in {"Model": ("position", "scale"), "first": ("weight", "bias"), "reduced": ("weight",),
                               "norm": ("weight", "bias", "running_mean"), "observed": ("largest",)}.items():
            for tensor in tensors:
                assert f"forward {layer}: {tensor}" in held, f"no {tensor} of {layer} in {sorted(held)}"
        for fault, where in FAULTS.items():
            for kind, options in OPTIONS.items():
                record(f"{folder}/{fault}.{kind}", PROGRAM, fault, options=options)
                verdict = diff(f"{folder}/{kind}.a", f"{folder}/{fault}.{kind}")
                # The hook that brings a weight in copies it, and operators are seen in hooks too.
                first = (*where[:3], "src") if kind == "ops" and fault != "gradient" else where
                if (fault, kind) == ("observed", "ops"):
                    first = (*where[:3], "other")  # the number that is added
                expect(place(verdict), ("diverged", *first), f"{fault}, with {kind} ({verdict['reason']})")
    print("what comes late is recorded when it is there")
