"""A Megatron model's local weights under the names of its sharded_state_dict, with global layer and expert indices.

Layer specs name the same weight differently: the local spec keeps a norm apart that TransformerEngine fuses into the linear layer
behind it, and experts live in a Sequential, or as weight0, weight1, ... of one grouped layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<sequential>\d+)\.(?P<linear>linear_fc[12])\.(?P<what>weight|bias)"
                     r"|(?P<grouped_linear>linear_fc[12])\.(?P<grouped_what>weight|bias)(?P<grouped>\d+))")  # fmt: skip
_TRAINED_BUFFERS = ("mlp.router.expert_bias",)  # state that Megatron keeps in a buffer and Hugging Face in a file


def named_weights(chunks: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(global name, local shard) of every weight of this rank's model chunks, which are GPTModels without wrappers."""
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_TRAINED_BUFFERS))
        for name, weight in (*chunk.named_parameters(), *buffers):
            found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            if not found:
                yield name, weight
                continue
            layer = chunk.decoder.layers[int(found[1])]
            yield f"decoder.layers.{layer.layer_number - 1}.{_within_layer(found[2], layer)}", weight


def _within_layer(name: str, layer: nn.Module) -> str:
    expert = _EXPERT.fullmatch(name)
    if expert:
        index = layer.mlp.local_expert_indices[int(expert["sequential"] or expert["grouped"])]
        return f"mlp.experts.{index}.{expert['linear'] or expert['grouped_linear']}.{expert['what'] or expert['grouped_what']}"
    if name == "input_layernorm.weight":
        return "self_attention.linear_qkv.layer_norm_weight"
    if name == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "experts"):
        return "mlp.linear_fc1.layer_norm_weight"
    return name
