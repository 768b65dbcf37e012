"""A small network trained by Lightning's Trainer: lightning_job.py [--fault LAYER@STEP].

The fault changes one bit of what a layer (net.0, net.2) gives, in one step."""
import logging
import os
import sys
import tempfile
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")

import lightning
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LAYER, _, STEP = (sys.argv[2] if sys.argv[1:2] == ["--fault"] else "@-1").partition("@")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.net(batch[0])

    def on_train_batch_end(self, outputs, batch, index):
        print("step", self.global_step, float(sum(p.double().abs().sum() for p in self.parameters())).hex(), flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def plant(layer):
    original = layer.forward

    def forward(*args):
        output = original(*args)
        if task.training and task.global_step == int(STEP):
            output = output.clone()
            output.data.view(torch.int32).view(-1)[3] ^= 1
        return output

    layer.forward = forward


lightning.seed_everything(0, verbose=False)
x, y = torch.randn(32, 6), torch.randint(3, (32,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
task = Task()
if LAYER:
    plant(task.get_submodule(LAYER))
with tempfile.TemporaryDirectory() as folder:
    lightning.Trainer(max_steps=5, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                      val_check_interval=2, limit_val_batches=1).fit(task, loader, loader)
