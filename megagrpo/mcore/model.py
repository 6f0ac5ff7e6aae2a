"""The actor's model: a Hugging Face config becomes Megatron's TransformerConfig, and that the GPTModel chunks of this rank.

Parameters are left unset: hf_mapping/folder.py fills every one. On GPUs with TransformerEngine its layer spec is used, elsewhere
Megatron's local one with the norm and attention of this package.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.config.keys import did_you_mean
from megagrpo.config.schema import Actor, Config
from megagrpo.hf_mapping.families import head_dim
from megagrpo.mcore.attention import PackedAttention
from megagrpo.mcore.norm import RMSNorm
from megagrpo.mcore.parallel import Parallel

_KERNELS = {
    "masked_softmax_fusion": "a GPU and apex, or TransformerEngine's layer spec",
    "gradient_accumulation_fusion": "a GPU and apex",
    "apply_rope_fusion": "TransformerEngine's layer spec",
}


def build_model(hf: dict[str, Any], config: Config, parallel: Parallel) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual stage), on its device, with parameters left unset.

    hf: config.json of a Hugging Face model. The vocabulary is padded to a multiple of the tensor-parallel size.
    """
    transformer = transformer_config(hf, config, parallel)
    padded_vocab_size = -(-hf["vocab_size"] // parallel.tp_size) * parallel.tp_size
    rope = rotary_arguments(hf)
    chunks = []
    for stage in range(parallel.vpp_size):
        virtual = {"vp_stage": stage} if parallel.vpp_size > 1 else {}
        chunk = GPTModel(
            transformer,
            _block_spec(hf, transformer, config, parallel, virtual.get("vp_stage")),
            vocab_size=padded_vocab_size,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=parallel.is_first_stage and stage == 0,
            post_process=parallel.is_last_stage and stage == parallel.vpp_size - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            position_embedding_type="rope",
            **rope,
            **virtual,
        )
        _reduce_experts_over_their_own_replicas(chunk)
        chunks.append(chunk.to(parallel.device))
    return chunks


def wrap_ddp(chunks: list[GPTModel], config: Config) -> list[DistributedDataParallel]:
    """The chunks in Megatron's DistributedDataParallel: fp32 gradient buffers, averaged over data-parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=config.actor.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # optimizer.py skips the step instead of ending the run
    )
    return [DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


def uses_transformer_engine(actor: Actor, device: torch.device) -> bool:
    """Which layer spec `actor.transformer_impl` means on this device."""
    available = device.type == "cuda" and find_spec("transformer_engine") is not None
    if actor.transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            "actor.transformer_impl=transformer_engine needs a CUDA device and the transformer-engine package; "
            "install the gpu extra, or set actor.transformer_impl=local"
        )
    return available and actor.transformer_impl != "local"


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


def transformer_config(hf: dict[str, Any], config: Config, parallel: Parallel) -> TransformerConfig:
    """Megatron's description of the model and of how it is spread. Raises ValueError for what Megatron cannot express."""
    actor, dtype = config.actor, getattr(torch, config.model.dtype)
    _refuse_inexpressible(hf)
    settings: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"].startswith("qwen3"),
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
        "calculate_per_token_loss": False,
        "finalize_model_grads_func": finalize_model_grads,
        **_experts(hf, uses_transformer_engine(actor, parallel.device)),
        **_recompute(actor),
        **resolve_fusions(actor, parallel.device),
        **_overrides(actor),
    }
    return TransformerConfig(**settings)


def _reduce_experts_over_their_own_replicas(chunk: GPTModel) -> None:
    """Megatron takes experts for dense weights while EP is 1, and with expert TP below TP then misses the replicas on TP ranks."""
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # by which DDP and optimizer know an expert's weight


def _leave_unset(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def _refuse_inexpressible(hf: dict[str, Any]) -> None:
    name = hf["model_type"]
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{name} with hidden_act={hf['hidden_act']} is not supported: only silu is")
    if hf.get("mlp_bias") or hf.get("attention_bias"):
        raise ValueError(f"{name} with attention_bias or mlp_bias is not supported")
    if hf.get("use_sliding_window"):
        raise ValueError(f"{name} with use_sliding_window is not supported")
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{name} with dense layers between the expert layers (mlp_only_layers, decoder_sparse_step) is not supported")


def _experts(hf: dict[str, Any], transformer_engine: bool) -> dict[str, Any]:
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))  # transformers 5 writes the latter
    if not num_experts:
        return {}
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        # softmax over the chosen experts equals softmax over all, renormalised
        "moe_router_pre_softmax": not hf.get("norm_topk_prob"),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine,
    }


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


def rotary_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """GPTModel's rotary arguments, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    parameters = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta", 10000.0)}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    arguments = {"rotary_base": parameters["rope_theta"], "rotary_percent": 1.0}
    if kind == "default":
        return arguments
    if kind == "linear":
        return {**arguments, "seq_len_interpolation_factor": parameters["factor"]}
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(parameters.get(name) == value for name, value in fixed.items()):
        return {**arguments, "rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
    raise ValueError(f"rope scaling {parameters} is not supported: default, linear, and llama3 with {fixed} are")


def _block_spec(
    hf: dict[str, Any], transformer: TransformerConfig, config: Config, parallel: Parallel, vp_stage: int | None
) -> TransformerBlockSubmodules:
    kinds = {
        "num_experts": transformer.num_moe_experts,
        "moe_grouped_gemm": transformer.moe_grouped_gemm,
        "qk_layernorm": transformer.qk_layernorm,
    }
    if uses_transformer_engine(config.actor, parallel.device):
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(**kinds), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(**kinds, normalization="RMSNorm"), RMSNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(transformer, vp_stage=vp_stage, pp_rank=parallel.pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
