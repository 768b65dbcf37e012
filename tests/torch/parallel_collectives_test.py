"""Collectives of torch.distributed on gloo: each is recorded once with its communicator, judged with all its members, and
the job is left as it was, also where a rank dies in one."""
import tempfile

from parallel_driver import collectives, diff, expect, job, place, printed, record, run, show

# Of rank 0 in each step.
EXPECTED = {
    (0, "all_reduce", "world"): ["input", "input", "output", "output"],
    (0, "all_reduce", "pair 0-1"): ["input", "output"],
    (0, "all_gather", "world"): ["input", "input", "output", "output.0", "output.1"],
    (0, "reduce_scatter", "world"): ["input", "output"],
    (0, "all_to_all", "world"): ["input", "output"],
    (0, "reduce", "world"): ["input", "output"],
    (0, "gather", "world"): ["input", "output.0", "output.1"],
    (0, "scatter", "world"): ["input.0", "input.1", "output"],
    (0, "send", "world"): ["input to 1"],
    (0, "recv", "world"): ["output from 1", "output from 1"],
    (0, "broadcast", "world"): ["output"],
}


def gloos(lines):
    """What gloo says itself differs by who notices first."""
    return [line.split("gloo/transport")[0] for line in lines]


def error_of(done):
    lines = [line for line in done.stderr.splitlines() if "RuntimeError" in line and "rank0" in line]
    return [line.split("[127")[0] for line in lines]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain = run(job(2, "by_hand"))
        good = record(f"{folder}/good", 2, "by_hand")
        expect(printed(good), printed(plain), "what the recorded job printed")
        found = {key: tensors for key, tensors in collectives(f"{folder}/good").items() if key[0] == 0}
        expect(found, EXPECTED, "collectives of a step")

        # The result of an all-reduce on rank 1, while the inputs of both ranks agree.
        record(f"{folder}/altered", 2, "by_hand", "--fault", "altered")
        verdict = diff(f"{folder}/good", f"{folder}/altered")
        expect(place(verdict), ("diverged", 1, 1, "collective", None, "all_reduce", "output"), "an altered all_reduce")
        expect(verdict["first"]["kind"], "collective", "an altered all_reduce")

        # What rank 1 hands to rank 0: its input is the first that differs, and what is received is propagated.
        record(f"{folder}/sent", 2, "by_hand", "--fault", "sent")
        verdict = diff(f"{folder}/good", f"{folder}/sent")
        expect(place(verdict), ("diverged", 1, 1, "collective", None, "send", "input to 0"), "a value sent on")
        expect(verdict["also_first"], [], "a value sent on: the receiver is no origin")

        # Rank 1 is killed while rank 0 waits for it: the job fails as it does alone, and what came before is there.
        alone = run(job(2, "killed"))
        dead = record(f"{folder}/dead", 2, "killed", ends_well=False)
        # Which of gloo's own errors it is depends on who notices first.
        expect((dead.status, gloos(error_of(dead))), (alone.status, gloos(error_of(alone))), "a rank that dies")
        assert error_of(dead), f"rank 0 should fail: {dead.stderr[-2000:]}"
        expect(show(f"{folder}/dead")["ranks"][1]["state"], "died", "the rank that was killed")
    print("collectives of gloo are recorded and judged")
