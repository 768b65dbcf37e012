"""A whole training step in a CUDA graph, replayed with new batches."""

import torch
from model import mlp, vector_batches

torch.manual_seed(0)
model = mlp(width=512).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
inputs, targets = torch.zeros(1024, 512, device="cuda"), torch.zeros(1024, 512, device="cuda")


def train():
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss


# Warmed up on a stream of its own, as captures ask for.
warm_up = torch.cuda.Stream()
warm_up.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm_up):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        train()
torch.cuda.current_stream().wait_stream(warm_up)
optimizer.zero_grad(set_to_none=True)  # so that the gradients are of the graph's own memory
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = train()

for step, (new_inputs, new_targets) in zip(range(8), vector_batches(1024, width=512)):
    torch.cuda.nvtx.range_push("step")
    inputs.copy_(new_inputs)
    targets.copy_(new_targets)
    graph.replay()
    print(f"step {step} loss {loss.item():.9g}")
    torch.cuda.nvtx.range_pop()
