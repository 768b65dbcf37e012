"""Two runs of one program: `diverged` where what they are for differs, `identical` where nothing that counts does."""
import sys
import tempfile

from bridge_driver import diff, place, record

BY_LEVEL = {  # models trained one after the other, in this order: where the second arm of each parts from the first, if it does
    "average_in_a_copy": (1, "optimizer", "kept.Sequential#2.0", "weight"),
    "averaged_model": (2, "optimizer", "kept.AveragedModel.module.0", "weight"),
    "teacher_without_gradients": {"layer": (2, "forward", "2", "bias"), "step": (2, "optimizer", "kept.Sequential#2.2", "bias")},
    "statistics_of_a_teacher": {"layer": (2, "forward", "2", "running_mean"), "step": (2, "optimizer", "kept.Sequential#2.2", "running_mean")},
    "buffer_of_a_layer": {"layer": (2, "forward", "2", "scale"), "step": (2, "forward", "loss", "loss")},
    "trained_in_evaluation_mode": (2, "data", None, "batch"),
    "step_that_raises": (3, "data", None, "batch"),
    "garbage_optimizers": None,
    "garbage_models": None,
    "threads_of_one_module": None,
    "evaluation_with_gradients": None,
    "long_evaluation": None,
    "modules_made_in_forward": None,
    "evaluated_behind_the_last_step": None,
}
STEPS = {"garbage_optimizers": 8, "garbage_models": 6}  # of the others: 4
# First steps: they hold what became of the model before, its average or its teacher, which are others in the second arm.
LEFT_OUT = {"averaged_model": 1, "teacher_without_gradients": 1, "statistics_of_a_teacher": 1, "buffer_of_a_layer": 1, "garbage_optimizers": 1}
CHANGED_UNOBSERVED = {"average_in_a_copy", "averaged_model", "teacher_without_gradients", "statistics_of_a_teacher"}

ALONE = {  # a program each, for what is behind the last step: level of the recording, place
    "clamped_behind_the_last_step": ("step", (3, "state", "0", "weight")),
    "clamped_and_freed": ("layer", (3, "state", "0", "weight")),
    "root_changed_and_freed": ("layer", (3, "state", "Own", "bias")),
    "statistics_behind_the_last_step": ("step", (3, "state", "2", "running_mean")),
}


def check_parts(folder, level):
    """One window of the steps for each model. Where training differs in it, what is left of the model before does not count."""
    names = ",".join(BY_LEVEL)
    record(f"{folder}/a", "bridge_arms.py", names, level=level)
    record(f"{folder}/same", "bridge_arms.py", names, level=level)
    found = diff(f"{folder}/a", f"{folder}/same")
    assert found["verdict"] == "identical", f"one arm twice at level {level}: {place(found)}, {found['reason']}"
    record(f"{folder}/b", "bridge_arms.py", names, names, level=level)
    first = 0
    for name, where in BY_LEVEL.items():
        last, begin = first + STEPS.get(name, 4) - 1, first + LEFT_OUT.get(name, 0)
        found = diff(f"{folder}/a", f"{folder}/b", "--steps", f"{begin}:{last}")
        where = where[level] if isinstance(where, dict) else where
        wanted = ("diverged", first + where[0], *where[1:]) if where else ("identical", None, None, None, None)
        assert place(found) == wanted, f"{name} at level {level}: {place(found)} ({found['reason']}), expected {wanted}"
        assert found["coverage"]["steps_compared"] == last - begin + 1, found["coverage"]
        cause = found["cause"]
        if name in CHANGED_UNOBSERVED:  # nothing recorded computed it, so it is not said that an op did
            assert cause["class"] == "unknown" and "overwritten_input" in cause["class_candidates"], (name, level, cause)
        first = last + 1


def check_alone(folder, name, level, where):
    record(f"{folder}/a", "bridge_arms.py", name, level=level)
    record(f"{folder}/b", "bridge_arms.py", name, name, level=level)
    found = diff(f"{folder}/a", f"{folder}/b")
    assert place(found) == ("diverged", *where), f"{name} at level {level}: {place(found)}, expected {where}"


if __name__ == "__main__":
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for level in "layer", "step":
            if not wanted or level in wanted:
                check_parts(f"{folder}/{level}", level)
        for name, (level, where) in ALONE.items():
            if not wanted or name in wanted:
                check_alone(f"{folder}/{name}", name, level, where)
    print("equal runs are identical, and others named where they part")
