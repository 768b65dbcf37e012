"""A tiny causal language model of Hugging Face's, trained by its Trainer: hf_trainer.py [--fault LAYER@STEP].

The fault changes one bit of what a layer (lm_head, model.layers.1.mlp) gives, in one step."""
import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", WANDB_DISABLED="true", CUDA_VISIBLE_DEVICES="")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LAYER, _, STEP = (sys.argv[2] if sys.argv[1:2] == ["--fault"] else "@-1").partition("@")


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


class Watch(TrainerCallback):
    """Prints the weights' sum at the end of each step, and tells the fault which step it is."""

    step = 0

    def on_step_begin(self, arguments, state, control, **more):
        Watch.step = state.global_step

    def on_step_end(self, arguments, state, control, model=None, **more):
        total = float(sum(p.double().abs().sum() for p in model.parameters()))
        print("step", state.global_step, total.hex(), flush=True)


def plant(layer):
    original = layer.forward

    def forward(*args):
        output = original(*args)
        if layer.training and Watch.step == int(STEP):
            output = output.clone()
            output.data.view(torch.int32).view(-1)[3] ^= 1
        return output

    layer.forward = forward


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16))
if LAYER:
    plant(model.get_submodule(LAYER))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
                                  logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
                                  use_cpu=True, eval_strategy="steps", eval_steps=2, seed=1)
    Trainer(model, arguments, train_dataset=Text(), eval_dataset=Text(), callbacks=[Watch()]).train()
