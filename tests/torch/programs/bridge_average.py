"""Trains a small model and keeps an average of its weights that nobody trains. Prints a hash of the average.

bridge_average.py [--evaluate] [--decay-at STEP]     --evaluate: the average is called behind step 2. --decay-at: the average
takes another share of the weights behind that step. All is local to a function, and gone when the program ends."""
import argparse
import copy
import hashlib

import torch
from torch import nn

STEPS = 6


def train(options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay = 0.5 if step == options.decay_at else 0.9
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters()):
                mine.mul_(decay).add_(theirs, alpha=1 - decay)
            if options.evaluate and step == 2:
                average(torch.ones(1, 8))
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in average.parameters())).hexdigest()[:16])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--decay-at", type=int, default=-1)
    train(parser.parse_args())
