"""Programs give the same results bit by bit with the probe and without it; it has no complaint, and steps are whole."""
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, alone, record, run

CASES = """nested views_and_in_place shared_and_stray own_function double_backward retain_graph frozen_and_unused
parameter_replaced autocast transforms jit scaler lbfgs no_module copies many_models exceptions threads compiled
compiled_part own_optimizer modules_made_in_forward
lazy_modules seeding_functions""".split()
OTHERS = [("bridge_gpt.py", "--steps", "3"), ("bridge_gan.py",), ("bridge_checkpoint.py", "reentrant"),
          ("bridge_checkpoint.py", "nonreentrant")]


def the_results_are_the_same(folder, program, *arguments, level):
    with_probe = record(folder, program, *arguments, level=level)
    without = alone(program, *arguments)
    assert with_probe.stdout == without.stdout, (
        f"{program} {arguments} at level {level}: found\n{with_probe.stdout}expected\n{without.stdout}")
    shown = run([FORKPOINT, "show", folder]).stdout
    assert "incomplete" not in shown and "Gap" not in shown, f"{program} {arguments}: expected whole steps:\n{shown}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(CASES):
            for level in ("layer",) if i % 4 else ("layer", "step"):
                the_results_are_the_same(f"{folder}/{case}.{level}", "bridge_cases.py", case, level=level)
        for i, (program, *arguments) in enumerate(OTHERS):
            the_results_are_the_same(f"{folder}/{i}", program, *arguments, level="layer")
            the_results_are_the_same(f"{folder}/{i}.step", program, *arguments, level="step")
    print(len(CASES) + len(OTHERS), "programs give the same results with the probe")
