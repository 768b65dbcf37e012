"""Two runs of one program: `diverged` where what they are for differs, `identical` where nothing that counts does."""
import sys
import tempfile

from bridge_driver import diff, place, record

DIVERGED = {  # case: step, phase, layer, tensor; at level step as well
    "clamped_behind_the_last_step": (3, "state", "0", "weight"),
    "clamped_and_freed": (3, "state", "0", "weight"),
    "root_changed_and_freed": (3, "state", "Own", "bias"),
    "statistics_behind_the_last_step": (3, "state", "2", "running_mean"),
    "average_in_a_copy": (1, "optimizer", "kept.Sequential#2.0", "weight"),
    "averaged_model": (2, "optimizer", "kept.AveragedModel.module.0", "weight"),
    "teacher_without_gradients": (2, "optimizer", "2", "bias"),
    "trained_in_evaluation_mode": (2, "data", None, "batch"),
    "step_that_raises": (3, "data", None, "batch"),
}
IDENTICAL = ["evaluated_behind_the_last_step", "garbage_optimizers", "garbage_models", "threads_of_one_module",
             "evaluation_with_gradients", "long_evaluation", "modules_made_in_forward"]


def check(folder, name, level):
    for arm, run in (0, "a"), (0, "same"), (1, "b"):
        record(f"{folder}/{name}.{level}.{run}", "bridge_arms.py", name, arm, level=level)
    a, same, b = (f"{folder}/{name}.{level}.{run}" for run in ("a", "same", "b"))
    found = diff(a, same)
    assert found["verdict"] == "identical", f"{name} twice at level {level}: {found['reason']}, expected identical"
    found = diff(a, b)
    if name in DIVERGED:
        expected = ("diverged", *DIVERGED[name])
        assert place(found) == expected, f"{name} at level {level}: found {place(found)}, expected {expected}"
    else:
        reason = found["reason"], place(found)
        assert found["verdict"] == "identical", f"{name} at level {level}: {reason}, expected identical"


if __name__ == "__main__":
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate([*DIVERGED, *IDENTICAL]):
            if not wanted or name in wanted:
                check(folder, name, "step" if i % 3 == 0 else "layer")
    print("equal runs are identical, and others named where they part")
