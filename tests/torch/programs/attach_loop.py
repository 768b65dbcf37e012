"""attach_loop.py STEPS SECONDS: a training loop that rests that long after each step; prints a digest of what it has learned."""
import hashlib
import sys
import time

import torch

torch.manual_seed(5)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
