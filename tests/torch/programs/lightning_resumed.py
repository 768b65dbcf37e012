"""A small network trained by Lightning's Trainer: lightning_resumed.py [--dir DIR] [--every K] [--ckpt_path FILE] [--lose STATE]
[--fault LAYER@STEP] [--gan].

Saves a checkpoint after every K steps into DIR. --lose momentum | schedule | rng | position | dtype: what a resume does not restore.
--fault: one bit of what a layer gives is changed in that step. --gan: two optimizers, stepped by hand."""
import argparse
import logging
import os
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
parser = argparse.ArgumentParser()
parser.add_argument("--dir", default="")
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--ckpt_path")
parser.add_argument("--lose", default="")
parser.add_argument("--fault", default="@-1")
parser.add_argument("--gan", action="store_true")
parser.add_argument("--name")
options = parser.parse_args()
LAYER, _, STEP = options.fault.partition("@")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 3))
        self.other = nn.Linear(3, 1)
        self.automatic_optimization = not options.gan
        self.done = 0

    def training_step(self, batch, index):
        if not options.gan:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * self.other(self.net(batch[0])).square().mean()
        first, second = self.optimizers()
        for optimizer in (first, second):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * self.other(self.net(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def on_train_start(self):
        self.done = self.trainer.fit_loop.total_batch_idx + 1

    def on_train_batch_end(self, outputs, batch, index):
        print("step", self.done, self.global_step, float(sum(p.double().abs().sum() for p in self.parameters())).hex(), flush=True)
        self.done += 1

    def on_save_checkpoint(self, checkpoint):
        checkpoint["generator"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        if options.lose == "momentum":
            for state in checkpoint["optimizer_states"][0]["state"].values():
                state["exp_avg"].zero_()
        if options.lose == "schedule":
            checkpoint["lr_schedulers"][0].update(last_epoch=0, _step_count=1, _last_lr=[1e-2])
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 1e-2
        if options.lose == "dtype":
            checkpoint["state_dict"] = {n: t.bfloat16().float() for n, t in checkpoint["state_dict"].items()}

    def configure_optimizers(self):
        if options.gan:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2), torch.optim.AdamW(self.other.parameters(), lr=1e-2)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Loader(torch.utils.data.DataLoader):
    """Says where it is, and begins there: what Lightning needs to resume within an epoch."""

    first = given = 0

    def __iter__(self):
        begin, self.first = self.first, 0
        self.given = begin
        for i, batch in enumerate(super().__iter__()):
            if i >= begin:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        if options.lose != "position":  # one that keeps no state at all is refused by Lightning itself
            self.first = state["given"]


class Generator(Callback):
    """Lightning does not save the generator's state: its users do. A loader draws from it when it begins."""

    saved = None

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.saved = checkpoint["generator"] if options.lose != "rng" else None

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.saved is not None:
            torch.set_rng_state(self.saved)
        self.saved = None


def plant(layer):
    original = layer.forward

    def forward(*args):
        output = original(*args)
        if task.training and task.done == int(STEP):
            output = output.clone()
            output.data.view(torch.int32).view(-1)[3] ^= 1
        return output

    layer.forward = forward


lightning.seed_everything(0, verbose=False)
x, y = torch.randn(24, 6), torch.randint(3, (24,))
data = torch.utils.data.TensorDataset(x, y)
loader = Loader(data, batch_size=4)
task = Task()
if LAYER:
    plant(task.get_submodule(LAYER))
callbacks = [Generator()]
if options.dir:
    callbacks.append(ModelCheckpoint(options.dir, options.name, every_n_train_steps=options.every, save_top_k=-1, save_last=True))
lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=bool(options.dir), callbacks=callbacks,
                  enable_progress_bar=False, enable_model_summary=False).fit(task, loader, ckpt_path=options.ckpt_path)
