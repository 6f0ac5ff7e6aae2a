"""A Megatron model's local parameters under the names of its sharded_state_dict, with global layer and expert indices.

Layer specs name the same weight differently: the local spec keeps a norm apart that TransformerEngine fuses into the linear layer
behind it, and experts live in a Sequential, or as weight0, weight1, ... of one grouped layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<sequential>\d+)\.(?P<linear>linear_fc[12])\.weight"
                     r"|(?P<grouped_linear>linear_fc[12])\.weight(?P<grouped>\d+))")  # fmt: skip


def named_parameters(chunks: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, local shard) of every parameter of this rank's model chunks, which are GPTModels without wrappers."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            if not found:
                yield name, parameter
                continue
            layer = chunk.decoder.layers[int(found[1])]
            yield f"decoder.layers.{layer.layer_number - 1}.{_within_layer(found[2], layer)}", parameter


def _within_layer(name: str, layer: nn.Module) -> str:
    expert = _EXPERT.fullmatch(name)
    if expert:
        index = layer.mlp.local_expert_indices[int(expert["sequential"] or expert["grouped"])]
        return f"mlp.experts.{index}.{expert['linear'] or expert['grouped_linear']}.weight"
    if name == "input_layernorm.weight":
        return "self_attention.linear_qkv.layer_norm_weight"
    if name == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "experts"):
        return "mlp.linear_fc1.layer_norm_weight"
    return name
