"""Qwen3 mixture of experts: Qwen3 with experts in the layers that the config names (all, in the published ones)."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families import qwen3
from megagrpo.hf_mapping.families.decoder import attention_rows, decoder_mapping, expert_fields, expert_rows, mlp_rows
from megagrpo.hf_mapping.table import Architecture, Family, Mapping


def architecture(hf: dict[str, Any]) -> Architecture:
    """Qwen3's, with the experts."""
    dense = qwen3.architecture(hf)
    return Architecture({**dense.transformer, **expert_layers(hf)}, dense.rope)


def expert_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Which layers have experts, and of what kind."""
    num_experts = hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]  # transformers 5 writes the latter
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return {
        **expert_fields(
            hf, num_experts=num_experts, ffn_hidden_size=hf["moe_intermediate_size"], renormalise=bool(hf.get("norm_topk_prob"))
        ),
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])],
    }


def mapping(hf: dict[str, Any]) -> Mapping:
    """Attention with norms, and rows for both kinds of layer."""
    return decoder_mapping(hf, *attention_rows(hf, qk_norm=True), *mlp_rows(), *expert_rows())


FAMILY = Family(architecture, mapping)
