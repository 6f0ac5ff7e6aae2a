"""The model families, by the exact model_type of a Hugging Face config.json. To add one, write its file and list it here."""

from __future__ import annotations

from typing import Any

from megagrpo.config.keys import did_you_mean
from megagrpo.hf_mapping.families import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megagrpo.hf_mapping.table import Family, Mapping

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
}


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a Hugging Face config. Raises ValueError for an unknown one, listing those that are known."""
    model_type = hf.get("model_type", "")
    if model_type not in FAMILIES:
        hint = did_you_mean(model_type, candidates=tuple(FAMILIES))
        raise ValueError(f"model_type {model_type!r} is not supported{hint}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def mapping_for(hf: dict[str, Any]) -> Mapping:
    """The mapping table of the model that a Hugging Face config describes."""
    return family_of(hf).mapping(hf)
