"""DistributedDataParallel on gloo: gradients before and after the reduction, buckets, a communication hook."""
import sys
import tempfile

from parallel_driver import FORKPOINT, PROGRAMS, collectives, diff, expect, job, place, printed, record, replicas, run, show

WORLD = "world"


def buckets_are_recorded(folder, what):
    found = collectives(folder)
    for rank in 0, 1:
        tensors = found.get((rank, "all_reduce", WORLD), [])
        assert "input" in tensors, f"{what}, rank {rank}: no bucket was recorded: {found}"
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain = run(job(2, "ddp"))
        good = record(f"{folder}/good", 2, "ddp")
        expect(printed(good), printed(plain), "what the recorded job printed")
        found = buckets_are_recorded(f"{folder}/good", "ddp")
        assert "output" in found[0, "all_reduce", WORLD], f"what came out of the reduction was not recorded: {found}"
        expect(replicas(f"{folder}/good")["verdict"], "identical", "the ranks of an undisturbed job")

        # One rank's gradient before the reduction: that rank is named, though the reduction hands it to the other.
        record(f"{folder}/gradient", 2, "ddp", "--fault", "gradient")
        verdict = diff(f"{folder}/good", f"{folder}/gradient")
        expect(place(verdict)[:5], ("diverged", 1, 1, "backward", "2"), "a gradient altered before the reduction")
        expect((verdict["first"]["tensor"], verdict["also_first"]), ("weight.grad", []), "and nothing else is an origin")
        expect(sorted(verdict["ranks_diverged"]), [0, 1], "whom it reached")

        # And after it: only that rank has it, and the ranks are out of sync.
        record(f"{folder}/reduced", 2, "ddp", "--fault", "reduced")
        verdict = diff(f"{folder}/good", f"{folder}/reduced")
        expect(place(verdict)[:5], ("diverged", 1, 1, "optimizer", "2"), "a gradient altered after the reduction")
        expect(verdict["first"]["tensor"], "weight.grad", "a gradient altered after the reduction")
        verdict = replicas(f"{folder}/reduced")
        expect((place(verdict)[:2], verdict["first"]["layer"]), (("diverged", 1), "2"), "ranks out of sync")

        # A hook in place of the reducer's own all-reduce, which changes its buffer behind it.
        hook = record(f"{folder}/hook", 2, "ddp_hook_divides_after")
        expect(printed(hook), printed(plain), "with a communication hook")
        buckets_are_recorded(f"{folder}/hook", "ddp_hook_divides_after")

        # What is recorded hangs on what the reducer waits for, not on when gloo's thread comes to say that it has ended.
        for kind in "ddp", "ddp_hook":
            record(f"{folder}/{kind}_late", 2, f"{kind}_late")
            for rank in 0, 1:
                expect(collectives(f"{folder}/{kind}_late")[rank, "all_reduce", WORLD], found[rank, "all_reduce", WORLD],
                       f"{kind}, with Works that are late to say that they have ended")
        # A map of the parameters that were used is reduced as well, and no Python waits for it.
        plain = run(job(2, "ddp_unused"))
        expect(printed(record(f"{folder}/unused", 2, "ddp_unused")), printed(plain), "what the job with unused parameters printed")
        record(f"{folder}/unused_late", 2, "ddp_unused_late")
        verdict = diff(f"{folder}/unused", f"{folder}/unused_late")
        expect((verdict["verdict"], verdict["gaps"]), ("identical", []), f"equal runs with unused parameters ({verdict['reason']})")
        for rank in 0, 1:
            maps = [r for r in show(f"{folder}/unused", "--steps", 1, "--ranks", rank, "--records")["records"]
                    if r["kind"] == "collective" and r["dtype"] == "i32"]
            expect([(r["tensor"], r["shape"], r["absmax"]) for r in maps], [("input", [6], 1), ("output", [6], 2)],
                   f"rank {rank}: the map of used parameters, before and after its reduction")

        record(f"{folder}/by_hand", 2, "future_by_hand")
        for rank in 0, 1:
            expect(set(collectives(f"{folder}/by_hand")[rank, "all_reduce", WORLD]), {"input"}, "futures that nobody was seen to wait for")

        # Ranks that no launcher has started: only torch knows which is which.
        done = run([FORKPOINT, "record", "--level", "layer", "-o", f"{folder}/spawned", "--", sys.executable,
                    PROGRAMS / "spawned_job.py", f"{folder}/meeting"])
        assert done.status == 0, f"the spawned job: status {done.status}: {done.stderr[-2000:]}"
        shown = show(f"{folder}/spawned")
        expect([(rank["rank"], rank["state"]) for rank in shown["ranks"]], [(0, "whole"), (1, "whole")], "ranks of a spawned job")
    print("DistributedDataParallel: gradients before and after the reduction")
