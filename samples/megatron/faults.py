"""Planted faults: KIND@step=N,rank=R,layer=L (from 0, layer over the whole pipeline). On the other ranks nothing is changed.

kernel         a matrix product in the forward pass of the layer's mlp.linear_fc1 leaves one element with a flipped bit
weight         one element of that layer's shard of the weight is altered before the step
grad           one element of the weight's gradient, between the backward pass and the optimizer
lr             this rank's learning rate is twice what it should be
lost-momentum  the optimizer's exp_avg is zero after --load          (wants no step)
lost-rng       the generators are not restored by --load             (wants no step)
lost-position  the data is read from its beginning again after --load (wants no step)
"""

import torch

KINDS = {"kernel", "weight", "grad", "lr", "lost-momentum", "lost-rng", "lost-position"}
BIT = {2: 1 << 12, 4: 1 << 29}  # of the exponent, by the size of an element: it shows, and remains finite


class Fault:
    """kind: "" where this rank has none."""

    def __init__(self, words, rank):
        self.kind, _, rest = (words or "").partition("@")
        given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        unknown = set(given) - {"step", "rank", "layer"}
        if unknown or (self.kind and self.kind not in KINDS):
            raise SystemExit(f"--fault {words}: known are {', '.join(sorted(KINDS))} with step, rank and layer")
        self.step, self.layer = int(given.get("step", -1)), int(given.get("layer", 0))
        if int(given.get("rank", rank)) != rank:
            self.kind = ""
        self.armed = False
        self.library = None

    def install(self, model):
        """model: this rank's stage."""
        self.module = next((layer.mlp.linear_fc1 for layer in model.decoder.layers if layer.layer_number - 1 == self.layer),
                           None)
        if self.kind in ("kernel", "weight", "grad") and self.module is None:
            raise SystemExit(f"--fault: layer {self.layer} is not on this rank")
        if self.kind == "kernel":
            self.module.register_forward_pre_hook(lambda *_: setattr(self, "armed", self.now))
            self.module.register_forward_hook(lambda *_: setattr(self, "armed", False))
            self.replace_kernel()

    def replace_kernel(self):
        """Beneath whatever looks at the operators: the same product, by the same kernel, and the bit."""
        def mm(left, right):
            out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
            torch.ops.aten.mm.out(left, right, out=out)
            if self.armed:
                flip(out)
                self.armed = False
            return out

        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("mm", mm, "CUDA" if self.module.weight.is_cuda else "CPU", allow_override=True)

    def before(self, step, optimizer):
        self.now = step == self.step
        if self.now and self.kind == "weight":
            flip(self.module.weight)
        for group in optimizer.param_groups if self.now and self.kind == "lr" else ():
            group["lr"] *= 2

    def before_optimizer(self, step):
        if step == self.step and self.kind == "grad":
            flip(self.module.weight.main_grad)


@torch.no_grad()
def flip(tensor):
    """A bit of the element in the middle."""
    size = tensor.element_size()
    words = tensor.detach().view(torch.int16 if size == 2 else torch.int32).view(-1)
    words[len(words) // 2] ^= BIT[size]
