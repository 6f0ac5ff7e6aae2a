"""Mistral: Llama with a sliding window in every layer, where the config has one."""

from __future__ import annotations

from typing import Any

from megagrpo.hf_mapping.families import llama
from megagrpo.hf_mapping.families.decoder import decoder_fields, head_dim, window_fields
from megagrpo.hf_mapping.rope import rope_of
from megagrpo.hf_mapping.table import Architecture, Family


def architecture(hf: dict[str, Any]) -> Architecture:
    """Llama's, and the window."""
    windowed = [hf.get("sliding_window") is not None] * hf["num_hidden_layers"]
    return Architecture({**decoder_fields(hf), **window_fields(hf, windowed)}, rope_of(hf, head_dim(hf)))


FAMILY = Family(architecture, llama.mapping)
