"""Programs give the same results bit by bit with the probe and without it; it has no complaint, and steps are whole. Those of
bridge_records_test.py are looked at there."""
import tempfile

from bridge_driver import the_results_are_the_same

CASES = [  # what shares a line shares a process: each has models of its own
    "double_backward retain_graph parameter_replaced autocast transforms jit copies",
    "many_models exceptions threads lazy_modules",
    "modules_made_in_forward",
    "own_optimizer",
    "compiled compiled_part",
    "seeding_functions",
]
AT_LEVEL_STEP = ["nested double_backward autocast jit lbfgs exceptions compiled", "own_optimizer"]
OTHERS_AT_LEVEL_STEP = [("bridge_gan.py",), ("bridge_checkpoint.py", "reentrant"), ("bridge_checkpoint.py", "nonreentrant")]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for i, line in enumerate(CASES):
            the_results_are_the_same(f"{folder}/{i}", "bridge_cases.py", *line.split())
        programs = [("bridge_cases.py", *line.split()) for line in AT_LEVEL_STEP] + OTHERS_AT_LEVEL_STEP
        for i, program in enumerate(programs):
            the_results_are_the_same(f"{folder}/{i}.step", *program, level="step")
    print(len(CASES) + len(programs), "programs give the same results with the probe")
