"""Qwen3: Llama with a norm on every head of the queries and keys, and perhaps a sliding window in some layers."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families.decoder import (
    attention_rows,
    declared_windows,
    decoder_fields,
    decoder_mapping,
    head_dim,
    mlp_rows,
    window_fields,
)
from megagrpo.hf_mapping.rope import rope_of
from megagrpo.hf_mapping.table import Architecture, Family, Mapping


def architecture(hf: dict[str, Any]) -> Architecture:
    """Llama's, with the norms and the windows."""
    fields = {**decoder_fields(hf), **window_fields(hf, declared_windows(hf)), "qk_layernorm": True}
    return Architecture(fields, rope_of(hf, head_dim(hf)))


def mapping(hf: dict[str, Any]) -> Mapping:
    """Attention with the norms, and dense MLP."""
    return decoder_mapping(hf, *attention_rows(hf, qk_norm=True), *mlp_rows())


FAMILY = Family(architecture, mapping)
