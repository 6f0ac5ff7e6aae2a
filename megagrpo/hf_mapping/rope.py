"""Rotary position embedding of a Hugging Face config: the frequencies themselves, so that Megatron need not know how they are scaled.

rope_parameters (transformers 5), or rope_theta and rope_scaling (before) -> Rope. Formulas: transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Angles and size of the rotation."""

    inverse_frequencies: Tensor  # [rotated size / 2] fp32
    attention_factor: float  # multiplies cos and sin
    rotated_share: float  # of the head
    interleaved: bool = False  # neighbouring elements are rotated together, not those half a head apart


def rope_of(hf: dict[str, Any], head_dim: int, *, interleaved: bool = False) -> Rope:
    """The rotation that a config asks for, in heads of head_dim. Raises ValueError for a scaling that is not known."""
    parameters = rope_parameters(hf)
    kind = parameters["rope_type"]
    share = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
    size = int(head_dim * share)
    base = parameters["rope_theta"]
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    factor = 1.0
    if kind == "default":
        frequencies = plain
    elif kind == "linear":
        frequencies = plain / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3(plain, parameters)
    else:
        frequencies, factor = _yarn(plain, parameters, size, base), _yarn_attention_factor(parameters)
    return Rope(frequencies, factor, share, interleaved)


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_type and the latter's parameters, of old and new config files alike."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    parameters = {"rope_theta": hf.get("rope_theta", 10000.0), **given}
    parameters["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if parameters["rope_type"] not in _KINDS:
        raise ValueError(f"rope_type {parameters['rope_type']!r} is not supported: {', '.join(_KINDS)} are")
    if parameters["rope_type"] == "yarn":
        parameters.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if parameters.get("factor") is None:
            parameters["factor"] = hf["max_position_embeddings"] / parameters["original_max_position_embeddings"]
    return parameters


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN stretches the logits of attention, as a factor on queries and keys each (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = parameters["original_max_position_embeddings"] / (2 * math.pi / plain)  # that fit into the original window
    kept = (waves - low) / (high - low)
    blended = (1 - kept) * plain / factor + kept * plain
    return torch.where(waves < low, plain / factor, torch.where(waves > high, plain, blended))


def _yarn(plain: Tensor, parameters: dict[str, Any], size: int, base: float) -> Tensor:
    """NTK-by-parts (arXiv:2309.00071, section 3.2): dimensions that turn often are kept, those that turn seldom are stretched."""
    window = parameters["original_max_position_embeddings"]

    def dimension_with(turns: float) -> float:
        return size * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = dimension_with(parameters.get("beta_fast") or 32)
    last = dimension_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / parameters["factor"] * stretched + plain * (1 - stretched)


def _yarn_attention_factor(parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(parameters["factor"], mscale) / yarn_mscale(parameters["factor"], all_dim)
    return yarn_mscale(parameters["factor"])
