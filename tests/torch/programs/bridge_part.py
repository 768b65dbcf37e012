"""An encoder that is asked for the size of its output before the model is made around it: bridge_part.py [wrong]. wrong: a
running mean of it is another from step 2 on, which no loss depends on."""
import sys

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval()
    with torch.no_grad():
        size = encoder(torch.zeros(1, 4)).shape[1]
    model = nn.Sequential(encoder, nn.Linear(size, 2)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and len(sys.argv) > 1:
            encoder[1].running_mean[0] += 1
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
