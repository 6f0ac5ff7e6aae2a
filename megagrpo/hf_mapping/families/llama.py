"""Llama 2 and 3 (and SmolLM, TinyLlama and others of model_type llama)."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families.decoder import attention_rows, decoder_fields, decoder_mapping, head_dim, mlp_rows
from megagrpo.hf_mapping.rope import rope_of
from megagrpo.hf_mapping.table import Architecture, Family, Mapping


def architecture(hf: dict[str, Any]) -> Architecture:
    """Llama as it was described first: every other family is told by its difference."""
    return Architecture(decoder_fields(hf), rope_of(hf, head_dim(hf)))


def mapping(hf: dict[str, Any]) -> Mapping:
    """Attention and dense MLP."""
    return decoder_mapping(hf, *attention_rows(hf), *mlp_rows())


FAMILY = Family(architecture, mapping)
