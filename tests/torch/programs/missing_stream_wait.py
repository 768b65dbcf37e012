"""The forward pass uses a copy of the weights, made on a stream of its own. Arm B does not wait for it at step 3."""

import sys

import torch

arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
width = 1024
master = torch.randn(width, width, device="cuda") / width**0.5
shadow = master.clone().requires_grad_()
copies = torch.cuda.Stream()
compute = torch.cuda.current_stream()
torch.cuda.synchronize()
for step in range(6):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(256, width, device="cuda")
    copies.wait_stream(compute)
    with torch.cuda.stream(copies), torch.no_grad():
        if step == 3:
            torch.cuda._sleep(2_000_000_000)  # a second: a slow all-gather
        shadow.copy_(master)
    if arm == "A" or step != 3:
        compute.wait_stream(copies)
    loss = torch.tanh(batch @ shadow).double().square().mean()
    shadow.grad = None
    loss.backward()
    master -= 0.5 * shadow.grad
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
