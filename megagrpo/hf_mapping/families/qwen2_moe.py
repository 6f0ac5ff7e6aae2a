"""Qwen1.5 and Qwen2 mixture of experts: Qwen2 with experts, and one gated expert that sees every token."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families import qwen2
from megagrpo.hf_mapping.families.decoder import HF as LAYER
from megagrpo.hf_mapping.families.decoder import MEGATRON, attention_rows, decoder_mapping, expert_rows, mlp_rows, shared_expert_rows
from megagrpo.hf_mapping.families.qwen3_moe import expert_layers
from megagrpo.hf_mapping.table import Architecture, Family, Mapping, Row
from megagrpo.hf_mapping.transforms import Replicated


def architecture(hf: dict[str, Any]) -> Architecture:
    """Qwen2's, with the experts and the shared one."""
    dense = qwen2.architecture(hf)
    shared = {"moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"], "moe_shared_expert_gate": True}
    return Architecture({**dense.transformer, **expert_layers(hf), **shared, "add_qkv_bias": hf.get("qkv_bias", True)}, dense.rope)


def mapping(hf: dict[str, Any]) -> Mapping:
    """Attention with the bias, and rows for both kinds of layer."""
    gate = Row(f"{MEGATRON}.mlp.shared_experts.gate_weight", (f"{LAYER}.mlp.shared_expert_gate.weight",), Replicated())
    attention = attention_rows(hf, qkv_bias=hf.get("qkv_bias", True))
    return decoder_mapping(hf, *attention, *mlp_rows(), *expert_rows(), *shared_expert_rows("shared_expert"), gate)


FAMILY = Family(architecture, mapping)
