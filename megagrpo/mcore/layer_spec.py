"""Which modules a decoder layer is made of: TransformerEngine's where it can be used, else Megatron's own with our norm and attention.

Architecture and TransformerConfig -> the TransformerBlockSubmodules of one pipeline stage.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megagrpo.config.schema import Actor
from megagrpo.hf_mapping.table import Architecture
from megagrpo.mcore.attention import PackedAttention
from megagrpo.mcore.norm import RMSNorm


def uses_transformer_engine(actor: Actor, device: torch.device) -> bool:
    """Which layer spec `actor.transformer_impl` means on this device."""
    available = device.type == "cuda" and find_spec("transformer_engine") is not None
    if actor.transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            "actor.transformer_impl=transformer_engine needs a CUDA device and the transformer-engine package; "
            "install the gpu extra, or set actor.transformer_impl=local"
        )
    return available and actor.transformer_impl != "local"


def block_spec(
    architecture: Architecture, config: TransformerConfig, *, transformer_engine: bool, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one stage, with or without experts as moe_layer_freq says, and its final norm."""
    build = _transformer_engine_layer if transformer_engine else _local_layer
    with_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))
    specs = {kind: build(config, config.num_moe_experts if kind else None) for kind in {with_experts[i] for i in layers}}
    return TransformerBlockSubmodules(layer_specs=[specs[with_experts[i]] for i in layers], layer_norm=_norm(transformer_engine))


def _norm(transformer_engine: bool) -> type:
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _transformer_engine_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def _local_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
