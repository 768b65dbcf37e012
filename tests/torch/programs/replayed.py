"""Trains with Adam and dropout and saves OUT/ckpt_STEP.pt: replayed.py --out DIR [--every K] [--from FILE] [--lose STATE] [--fault STEP]
[--more] [--pace SECONDS].

--more: also with a batch norm, a GradScaler, an average of the weights and generators of Python and NumPy. --lose momentum | rng |
data | lr, and of more: statistics | scale | average | numpy: what a resume does not restore. --fault: one weight is changed before
this step. --pace: waits in each step. Never ends by itself before step 200, and does not care for SIGTERM.
"""
import argparse
import copy
import os
import random
import signal
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--from", dest="start")
parser.add_argument("--lose", default="")
parser.add_argument("--fault", type=int, default=-1)
parser.add_argument("--more", action="store_true")
parser.add_argument("--pace", type=float, default=0.0)
options = parser.parse_args()
signal.signal(signal.SIGTERM, lambda number, frame: None)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
if options.more:
    import numpy

    random.seed(4)
    numpy.random.seed(5)
    model.append(nn.BatchNorm1d(4))
    average = copy.deepcopy(model)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=options.more)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
data = torch.Generator().manual_seed(11)
step = 0
if options.start:
    saved = torch.load(options.start, weights_only=False)
    step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    if options.lose == "momentum":
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    if options.lose == "lr":
        optimizer.param_groups[0]["lr"] = 0.01
    if options.more:
        if options.lose == "statistics":
            model[4].reset_running_stats()
        if options.lose != "scale":
            scaler.load_state_dict(saved["scaler"])
        if options.lose != "average":
            average.load_state_dict(saved["average"])
        if options.lose != "numpy":
            numpy.random.set_state(saved["numpy"])
        random.setstate(saved["random"])
    if options.lose != "rng":
        torch.set_rng_state(saved["rng"])
    if options.lose != "data":
        data.set_state(saved["data"])
while step < 200:
    if step == options.fault:
        with torch.no_grad():
            model[3].weight[1, 2] += 1
    batch = torch.randn(6, 8, generator=data)
    if options.more:
        batch = batch * float(1 + random.random() + numpy.random.rand())
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if options.more:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1)
    step += 1
    print(f"step {step - 1} loss {loss.item():.6f}", flush=True)
    if options.every and step % options.every == 0:
        path = f"{options.out}/ckpt_{step}.pt"
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                 "rng": torch.get_rng_state(), "data": data.get_state()}
        if options.more:
            state.update(scaler=scaler.state_dict(), average=average.state_dict(), numpy=numpy.random.get_state(),
                         random=random.getstate())
        torch.save(state, path + ".part")
        os.rename(path + ".part", path)
    time.sleep(options.pace)
