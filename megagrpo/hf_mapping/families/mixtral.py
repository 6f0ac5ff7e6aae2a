"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families import mistral
from megagrpo.hf_mapping.families.decoder import attention_rows, decoder_mapping, expert_fields, expert_rows
from megagrpo.hf_mapping.table import Architecture, Family, Mapping


def architecture(hf: dict[str, Any]) -> Architecture:
    """Mistral's, and experts whose weights are renormalised."""
    dense = mistral.architecture(hf)
    experts = expert_fields(hf, num_experts=hf["num_local_experts"], ffn_hidden_size=hf["intermediate_size"], renormalise=True)
    return Architecture({**dense.transformer, **experts}, dense.rope)


def mapping(hf: dict[str, Any]) -> Mapping:
    """Attention and experts, which are called w1 (gate), w2 (down) and w3 (up)."""
    return decoder_mapping(hf, *attention_rows(hf), *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2"))


FAMILY = Family(architecture, mapping)
