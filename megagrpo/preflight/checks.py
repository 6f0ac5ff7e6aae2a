"""What does not fit together in a configuration, found before anything is loaded.

Config, process counts and the model's config.json -> a list of problems, each with its fix. Needs neither torch nor a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megagrpo.config.keys import did_you_mean
from megagrpo.config.paths import resolve_data_files, resolve_model_path
from megagrpo.config.schema import BUILT_IN_REWARDS, Actor, Config
from megagrpo.preflight.layout import Layout
from megagrpo.preflight.megatron_fields import transformer_config_fields

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")  # hf_mapping/families/, which imports torch
# Fields of TransformerConfig that follow from the model or that the loss and the packing rely on (mcore/model.py sets them).
_OWNED_FIELDS = frozenset(
    (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("normalization", "layernorm_epsilon", "activation_func", "gated_linear_unit", "add_bias_linear", "add_qkv_bias"),
        *("qk_layernorm", "hidden_dropout", "attention_dropout", "bf16", "fp16", "params_dtype", "pipeline_dtype"),
        *("init_method", "output_layer_init_method", "embedding_init_method", "finalize_model_grads_func"),
        *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "calculate_per_token_loss"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_token_dispatcher_type"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    )
)


def check_run(config: Config, *, world_size: int, local_world_size: int) -> list[str]:
    """Every inconsistency of a run on `world_size` processes, `local_world_size` of them on each node; reads the model's config.json."""
    try:
        model_config = read_model_config(config.model.path)
    except ValueError as error:
        return [str(error), *check_config(config, world_size=world_size, local_world_size=local_world_size, model_config={})]
    return check_config(config, world_size=world_size, local_world_size=local_world_size, model_config=model_config)


def read_model_config(path: str) -> dict[str, Any]:
    """The config.json of a Hugging Face model folder (or of `demo`). Raises ValueError when there is none to be read."""
    folder = resolve_model_path(path)
    file = folder / "config.json"
    if not file.is_file():
        missing = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ValueError(f"model.path={path} {missing}; set it to a Hugging Face model folder, or to demo")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.path={path}: its config.json is not valid JSON ({error})") from error


def check_config(config: Config, *, world_size: int, local_world_size: int, model_config: dict[str, Any]) -> list[str]:
    """Every inconsistency at once. What needs the model's shape is left out where model_config ({} when unknown) lacks the key."""
    layout = Layout(config, world_size=world_size)
    return [
        *check_model_layout(config, model_config),
        *_check_process_counts(config, layout, local_world_size),
        *_check_lengths(config, model_config),
        *_check_batch(config, layout),
        *_check_kernels(config),
        *_check_override_transformer_config(config),
        *_check_files(config),
        *_check_rewards(config),
    ]


def check_model_layout(config: Config, model_config: dict[str, Any]) -> list[str]:
    """What keeps the model from being spread as config.actor says, whatever the number of processes."""
    return [
        *_check_model_type(model_config),
        *_check_pipeline(config.actor, model_config),
        *_check_tensor_parallel(config, model_config),
        *_check_experts(config, model_config),
    ]


def _check_model_type(model_config: dict[str, Any]) -> Iterator[str]:
    model_type = model_config.get("model_type")
    if model_type is not None and model_type not in MODEL_TYPES:
        hint = did_you_mean(model_type, candidates=MODEL_TYPES)
        yield f"model.path: model_type {model_type} is not supported{hint}; supported are {', '.join(MODEL_TYPES)}"


def _check_process_counts(config: Config, layout: Layout, local_world_size: int) -> Iterator[str]:
    actor, world_size = config.actor, layout.world_size
    for name, size in layout.actor_multiples().items():
        if world_size % size:
            yield (
                f"{world_size} processes are not a multiple of {name} = {size}; start a multiple of {size} processes "
                f"or choose actor sizes whose product divides {world_size}"
            )
    rollout_size = config.rollout.tensor_parallel_size
    if local_world_size % rollout_size:
        yield (
            f"rollout.tensor_parallel_size={rollout_size} does not divide the {local_world_size} processes of a node; "
            f"set it to a divisor of {local_world_size}"
        )
    if actor.sequence_parallel and actor.tensor_model_parallel_size == 1:
        yield "actor.sequence_parallel=true needs actor.tensor_model_parallel_size > 1; set one of the two"


def _check_pipeline(actor: Actor, model_config: dict[str, Any]) -> Iterator[str]:
    stages, chunks = actor.pipeline_model_parallel_size, actor.virtual_pipeline_model_parallel_size
    ends = {
        name: layers
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (layers := getattr(actor, name)) is not None
    }
    if stages == 1:
        for name in (*(["virtual_pipeline_model_parallel_size"] if chunks else []), *ends):
            yield f"actor.{name} needs actor.pipeline_model_parallel_size > 1; unset it (actor.{name}=)"
        return
    num_layers = model_config.get("num_hidden_layers")
    if num_layers is None:
        return
    uneven = [f"actor.{name}={layers}" for name, layers in ends.items() if chunks and layers % chunks]
    for given in uneven:
        yield f"{given} is not a multiple of actor.virtual_pipeline_model_parallel_size={chunks}; make it one"
    rest, other_stages = num_layers - sum(ends.values()), stages - len(ends)
    if rest < 0 or (other_stages == 0 and rest > 0) or (other_stages and (rest == 0 or rest % (other_stages * (chunks or 1)))):
        parts = f"{other_stages} stages" + (f" x {chunks} chunks" if chunks else "")
        beside = f" ({num_layers} without the first and last stage's {sum(ends.values())})" if ends else ""
        yield (
            f"{rest} layers{beside} cannot be shared out evenly over {parts}; change actor.pipeline_model_parallel_size, "
            "actor.virtual_pipeline_model_parallel_size, or give uneven ends: actor.num_layers_in_first_pipeline_stage, "
            "actor.num_layers_in_last_pipeline_stage"
        )


def _check_tensor_parallel(config: Config, model_config: dict[str, Any]) -> Iterator[str]:
    for key, size, replicates_kv_heads in (
        ("actor.tensor_model_parallel_size", config.actor.tensor_model_parallel_size, False),
        ("rollout.tensor_parallel_size", config.rollout.tensor_parallel_size, True),
    ):
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            total = model_config.get(name)
            if not total or total % size == 0:
                continue
            # vLLM gives several ranks the same key-value head when there are more ranks than heads.
            if name == "num_key_value_heads" and replicates_kv_heads and size % total == 0:
                continue
            yield f"{key}={size} does not divide the model's {name}={total}; set {key} to a divisor of {total}"


def _check_experts(config: Config, model_config: dict[str, Any]) -> Iterator[str]:
    actor = config.actor
    num_experts = _num_experts(model_config)
    sizes = {
        "actor.expert_model_parallel_size": actor.expert_model_parallel_size,
        "actor.expert_tensor_parallel_size": actor.expert_tensor_parallel_size,
    }
    if num_experts is None:
        if not model_config:
            return
        for key, size in sizes.items():
            if size > 1:
                yield f"{key}={size} needs a mixture-of-experts model, which {config.model.path} is not; set it to 1"
        if config.rollout.enable_expert_parallel:
            yield f"rollout.enable_expert_parallel=true needs a mixture-of-experts model, which {config.model.path} is not; set it to false"
        return
    if num_experts % actor.expert_model_parallel_size:
        yield (
            f"actor.expert_model_parallel_size={actor.expert_model_parallel_size} does not divide the model's {num_experts} experts; "
            f"set it to a divisor of {num_experts}"
        )
    expert_width = model_config.get("moe_intermediate_size", model_config.get("intermediate_size"))
    if expert_width and expert_width % actor.expert_tensor_parallel_size:
        yield (
            f"actor.expert_tensor_parallel_size={actor.expert_tensor_parallel_size} does not divide the width {expert_width} of an expert; "
            f"set it to a divisor of {expert_width}"
        )
    if actor.tensor_model_parallel_size > 1 and not actor.sequence_parallel:
        yield "a mixture-of-experts model with actor.tensor_model_parallel_size > 1 needs actor.sequence_parallel=true"


def _num_experts(model_config: dict[str, Any]) -> int | None:
    # Mixtral, Qwen-MoE and DeepSeek each name it differently.
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((model_config[name] for name in names if model_config.get(name)), None)


def _check_lengths(config: Config, model_config: dict[str, Any]) -> Iterator[str]:
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    positions = model_config.get("max_position_embeddings")
    if positions and longest > positions:
        yield (
            f"data.max_prompt_length + rollout.max_response_length = {longest} exceeds the model's {positions} positions; "
            f"lower one of the two"
        )


def _check_batch(config: Config, layout: Layout) -> Iterator[str]:
    rollout, algorithm, optimizer = config.rollout, config.algorithm, config.optimizer
    if rollout.num_samples_per_prompt == 1:
        yield "rollout.num_samples_per_prompt=1 makes every advantage zero (it is relative to the group); set at least 2"
    if rollout.num_prompts_per_step % algorithm.num_mini_batches:
        yield (
            f"algorithm.num_mini_batches={algorithm.num_mini_batches} does not divide rollout.num_prompts_per_step="
            f"{rollout.num_prompts_per_step}; set it to a divisor"
        )
    samples = rollout.num_prompts_per_step * rollout.num_samples_per_prompt // algorithm.num_mini_batches
    if samples < layout.data_parallel_size:
        yield (
            f"a mini-batch has {samples} samples for {layout.data_parallel_size} data-parallel ranks; raise "
            "rollout.num_prompts_per_step or lower algorithm.num_mini_batches"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}; lower it"
    if optimizer.optimizer == "sgd" and config.actor.use_distributed_optimizer:
        yield "optimizer.optimizer=sgd is not sharded by Megatron, only adam is; set actor.use_distributed_optimizer=false"


def _check_kernels(config: Config) -> Iterator[str]:
    actor = config.actor
    if actor.context_parallel_size > 1:
        yield f"actor.context_parallel_size={actor.context_parallel_size} is not supported yet; set it to 1"
    if actor.transformer_impl == "transformer_engine" and (config.trainer.device == "cpu" or find_spec("transformer_engine") is None):
        yield (
            'actor.transformer_impl=transformer_engine needs a GPU and TransformerEngine (pip install -e ".[gpu]"); '
            "without them set it back to its default"
        )
    if "wandb" in config.logging.trackers and find_spec("wandb") is None:
        yield 'logging.trackers: wandb is not installed; pip install -e ".[wandb]", or take it out'


def _check_override_transformer_config(config: Config) -> Iterator[str]:
    extra = config.actor.override_transformer_config.model_extra or {}
    if not extra:
        return
    fields = transformer_config_fields()
    if fields is None:
        yield "actor.override_transformer_config cannot be checked: megatron-core is not installed in this Python"
        return
    for name in extra:
        if name in Actor.model_fields:
            yield f"actor.override_transformer_config.{name} has a setting of its own; set actor.{name}"
        elif name in _OWNED_FIELDS:
            yield f"actor.override_transformer_config.{name} follows from the model or from how the loss is scaled; take it out"
        elif name not in fields:
            hint = did_you_mean(name, candidates=fields)
            yield f"actor.override_transformer_config.{name} is no field of Megatron's TransformerConfig{hint}"


def _check_files(config: Config) -> Iterator[str]:
    data = config.data
    if config.model.tokenizer_path and not resolve_model_path(config.model.tokenizer_path).is_dir():
        yield f"model.tokenizer_path={config.model.tokenizer_path} is not a folder; set the tokenizer's, or null for the model's"
    for key, files in (
        ("data.train_files", resolve_data_files(data.train_files, split="train")),
        ("data.val_files", resolve_data_files(data.val_files, split="val")),
    ):
        if key == "data.train_files" and not files:
            yield "data.train_files names no file; set at least one"
        for file in files:
            if file.startswith("reasoning_gym:"):
                if find_spec("reasoning_gym") is None:
                    yield f"{key}: {file} needs the reasoning-gym package; pip install reasoning-gym"
            elif not file.endswith((".jsonl", ".parquet")):
                yield f"{key}: {file} is neither .jsonl nor .parquet nor reasoning_gym:<task>"
            elif not Path(file).expanduser().is_file():
                yield f"{key}: {file} does not exist"


def _check_rewards(config: Config) -> Iterator[str]:
    if not config.reward.functions:
        yield "reward.functions is empty; set at least one, such as reward.functions={math_answer: 1.0}"
    for name in config.reward.functions:
        module, colon, _ = name.rpartition(":")
        if not colon:
            if name not in BUILT_IN_REWARDS:
                hint = did_you_mean(name, candidates=BUILT_IN_REWARDS)
                yield f"reward.functions: {name} is neither one of {', '.join(BUILT_IN_REWARDS)} nor module:function{hint}"
        elif module.endswith(".py") and not Path(module).expanduser().is_file():
            yield f"reward.functions: {name}: the file {module} does not exist"
    names = resolve_data_files(config.data.train_files, split="train")
    if "reasoning_gym" in config.reward.functions and not any(name.startswith("reasoning_gym:") for name in names):
        yield "reward.functions: reasoning_gym scores the answers of data.train_files=reasoning_gym:<task> only; set both"
