"""What a transformer layer is made of: Megatron Core's own modules, or Transformer Engine's."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class Norm(torch.nn.LayerNorm):
    """torch's LayerNorm, also where the sequence is cut over tensor-parallel ranks. Each rank then has the gradient of its
    own tokens only: parameters that say so are added up by finalize_model_grads."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def layers_of(args, config):
    """Of this rank's stage, for GPTModel."""
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec()
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), Norm)
