"""Shards carry their place in the whole tensor: FSDP2 and tensor parallel compare between worlds of other sizes, and within
a run replicas are told from shards."""
import tempfile

from parallel_driver import diff, expect, job, place, printed, record, replicas, run, show


def boxes(folder, tensor):
    rows = show(folder, "--steps", "0", "--tensor", tensor, "--layer", "0", "--phase", "optimizer")["records"]
    return sorted((row["rank"], tuple(row["global_offset"]), tuple(row["shape"])) for row in rows)


def fully_sharded(folder):
    two = record(f"{folder}/two", 2, "fsdp2")
    expect(printed(two), printed(run(job(2, "fsdp2"))), "what the recorded job printed")
    expect(boxes(f"{folder}/two", "weight.momentum_buffer"), [(0, (0, 0), (6, 6)), (1, (6, 0), (6, 6))], "two ranks")
    record(f"{folder}/four", 4, "fsdp2")
    places = [(rank, (3 * rank, 0), (3, 6)) for rank in range(4)]
    expect(boxes(f"{folder}/four", "weight"), places, "four ranks")
    verdict = diff(f"{folder}/two", f"{folder}/four")
    expect((verdict["verdict"], verdict["gaps"]), ("identical", []), f"two ranks and four ({verdict['reason']})")
    expect(replicas(f"{folder}/four")["verdict"], "identical", "other shards on each rank are no loss of sync")

    record(f"{folder}/struck", 4, "fsdp2", "--fault", "gradient")
    verdict = diff(f"{folder}/two", f"{folder}/struck")
    expect((place(verdict)[:2], verdict["first"]["layer"], verdict["first"]["tensor"]),
           (("diverged", 1), "2", "weight.grad"), "a fault in one shard of four against two ranks")


def tensor_parallel(folder):
    # At level step: inside of the layers that are cut, activations have no whole counterpart.
    record(f"{folder}/cut", 2, "tensor_parallel", level="step")
    record(f"{folder}/whole", 1, "tensor_parallel", level="step")
    verdict = diff(f"{folder}/whole", f"{folder}/cut")
    expect((verdict["verdict"], verdict["gaps"]), ("identical", []), f"whole and cut ({verdict['reason']})")
    expect(replicas(f"{folder}/cut")["verdict"], "identical", "shards of tensor parallel")
    record(f"{folder}/norm", 2, "tensor_parallel", "--fault", "norm")
    verdict = replicas(f"{folder}/norm")
    expect((place(verdict)[:2], verdict["first"]["layer"]), (("diverged", 1), "0"), "a norm that is out of sync")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fully_sharded(folder)
        tensor_parallel(folder)
    print("shards compare between worlds, and replicas within one")
