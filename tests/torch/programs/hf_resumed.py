"""A tiny causal language model, trained by Hugging Face's Trainer as its own examples do it: hf_resumed.py [TrainingArguments]
[--lose STATE] [--fault LAYER@STEP] [--shards].

--lose momentum | schedule | rng | position | dtype: what a resume does not restore. --fault: one bit of what a layer gives is
changed in that step. --shards: the model is saved in several files. It has dropout, shuffles, accumulates gradients over two
batches and warms its learning rate up, so that each of these states counts."""
import dataclasses
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", WANDB_DISABLED="true", CUDA_VISIBLE_DEVICES="")

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


@dataclasses.dataclass
class Options:
    lose: str = ""
    fault: str = "@-1"
    shards: bool = False


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 44  # an epoch has 5 and a half steps

    def __getitem__(self, i):
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


class Forgetful(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        fresh = self.lr_scheduler.state_dict() if self.lr_scheduler else None
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and options.lose == "momentum":
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        if checkpoint and options.lose == "schedule":
            self.lr_scheduler.load_state_dict(fresh)
            for group in self.optimizer.param_groups:
                group["lr"] = fresh["_last_lr"][0]

    def _load_from_checkpoint(self, checkpoint, model=None):
        super()._load_from_checkpoint(checkpoint, model)
        if options.lose == "dtype":  # saved, and loaded, as a half-precision copy
            for parameter in self.model.parameters():
                parameter.data = parameter.data.bfloat16().float()

    def _load_rng_state(self, checkpoint):
        if options.lose != "rng":
            super()._load_rng_state(checkpoint)

    def save_model(self, folder=None, _internal_call=False):
        if options.shards:
            self.model.save_pretrained(folder, max_shard_size="4KB")
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        else:
            super().save_model(folder, _internal_call)


class Watch(TrainerCallback):
    step = 0

    def on_step_begin(self, arguments, state, control, **more):
        Watch.step = state.global_step

    def on_step_end(self, arguments, state, control, model=None, **more):
        total = float(sum(p.double().abs().sum() for p in model.parameters()))
        print("step", state.global_step - 1, total.hex(), flush=True)


def plant(layer, step):
    original = layer.forward

    def forward(*args):
        output = original(*args)
        if layer.training and Watch.step == step:
            output = output.clone()
            output.data.view(torch.int32).view(-1)[3] ^= 1
        return output

    layer.forward = forward


defaults = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_steps", "9", "--logging_strategy", "no",
            "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--warmup_steps", "5", "--learning_rate", "0.01",
            "--save_strategy", "no"]
options, arguments = HfArgumentParser([Options, TrainingArguments]).parse_args_into_dataclasses(defaults + sys.argv[1:])
arguments.ignore_data_skip = options.lose == "position"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                     num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.1))
layer, _, step = options.fault.partition("@")
if layer:
    plant(model.get_submodule(layer), int(step))
Forgetful(model, arguments, train_dataset=Text(), callbacks=[Watch()]).train(resume_from_checkpoint=arguments.resume_from_checkpoint)
