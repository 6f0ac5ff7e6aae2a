"""The model's description in Megatron's terms: what its family says, how it is spread over ranks, and which kernels it uses.

Architecture, configuration and layout -> TransformerConfig.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megagrpo.config.keys import did_you_mean
from megagrpo.config.schema import Actor, Config
from megagrpo.hf_mapping.table import Architecture
from megagrpo.mcore.layer_spec import uses_transformer_engine
from megagrpo.mcore.parallel import Parallel

_KERNELS = {
    "masked_softmax_fusion": "a GPU and apex, or TransformerEngine's layer spec",
    "gradient_accumulation_fusion": "a GPU and apex",
    "apply_rope_fusion": "TransformerEngine's layer spec",
}


def transformer_config(architecture: Architecture, config: Config, parallel: Parallel) -> TransformerConfig:
    """Megatron's description of the model and of how it is spread. Raises ValueError for what Megatron cannot express."""
    actor, dtype = config.actor, getattr(torch, config.model.dtype)
    settings: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tp_size,
        "pipeline_model_parallel_size": parallel.pp_size,
        "virtual_pipeline_model_parallel_size": actor.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.cp_size,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
        "sequence_parallel": actor.sequence_parallel,
        "num_layers_in_first_pipeline_stage": actor.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": actor.num_layers_in_last_pipeline_stage,
        "variable_seq_lengths": True,
        # two stages are each other's previous and next: messages of both directions in one batch would be mixed up
        "overlap_p2p_comm": parallel.vpp_size > 1,
        "batch_p2p_comm": parallel.vpp_size == 1,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes variable lengths; checked for dense models too
        "moe_grouped_gemm": "num_moe_experts" in architecture.transformer and uses_transformer_engine(actor, parallel.device),
        "calculate_per_token_loss": False,
        "finalize_model_grads_func": finalize_model_grads,
        **architecture.transformer,
        **_rotation(architecture),
        **_recompute(actor),
        **resolve_fusions(actor, parallel.device),
        **_overrides(actor),
    }
    kind = MLATransformerConfig if architecture.transformer.get("multi_latent_attention") else TransformerConfig
    return kind(**settings)


def resolve_fusions(actor: Actor, device: torch.device) -> dict[str, bool]:
    """The fusions of actor.override_transformer_config with `auto` decided: on where the kernels exist and the layer spec uses them.

    Raises ValueError where one is asked for whose kernels are missing.
    """
    te, cuda = uses_transformer_engine(actor, device), device.type == "cuda"
    automatic = {
        "masked_softmax_fusion": te or (cuda and find_spec("scaled_upper_triang_masked_softmax_cuda") is not None),
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "gradient_accumulation_fusion": cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "apply_rope_fusion": te,
    }
    chosen = {name: getattr(actor.override_transformer_config, name) for name in automatic}
    for name, source in _KERNELS.items():
        if chosen[name] is True and not automatic[name]:
            raise ValueError(f"actor.override_transformer_config.{name}=true needs {source}; set it to auto or false")
    return {name: automatic[name] if value == "auto" else value for name, value in chosen.items()}


def _leave_unset(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def _rotation(architecture: Architecture) -> dict[str, Any]:
    """How the rotation shows in attention: a factor on cos and sin is one, squared, on the logits."""
    rope, fields_ = architecture.rope, architecture.transformer
    if rope.attention_factor == 1.0 or fields_.get("multi_latent_attention"):
        return {"rotary_interleaved": rope.interleaved}
    if rope.rotated_share != 1.0:
        raise ValueError("a rope scaling with an attention factor is not supported where only a part of each head is rotated")
    scale = fields_.get("softmax_scale") or fields_["kv_channels"] ** -0.5
    return {"rotary_interleaved": rope.interleaved, "softmax_scale": scale * rope.attention_factor**2}


def _recompute(actor: Actor) -> dict[str, Any]:
    if actor.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if actor.recompute == "selective" else {}


def _overrides(actor: Actor) -> dict[str, Any]:
    """The fields set by hand, fusions excepted; each must be one of TransformerConfig's."""
    given = actor.override_transformer_config.model_extra or {}
    known = {field.name for field in fields(TransformerConfig)}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, candidates=tuple(known))
            raise ValueError(f"actor.override_transformer_config.{name} is no field of Megatron's TransformerConfig{hint}")
    return given
