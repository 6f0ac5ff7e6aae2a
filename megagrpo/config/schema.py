"""Everything that can be set, with its type, bounds, default and meaning. Imports no torch.

Names are those users know: Megatron's for parallelism, vLLM's for the engine, verl's for the algorithm.
The docstring below a field is its help text: `--help`, configs/base.yaml and docs/configuration.md are generated from it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

BUILT_IN_REWARDS = ("math_answer", "format", "reasoning_gym")

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: object) -> object:
    """A size in bytes from an integer or a text such as `512MiB` or `1.5 GB`; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B?)\s*", value, re.IGNORECASE)
    if not match:
        raise ValueError("must be an integer or a number with a unit: 512MiB, 4GiB, 1.5GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), WithJsonSchema({"type": "integer", "format": "bytes, such as 512MiB"})]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]


class Section(BaseModel):
    """A frozen group of settings that knows its keys; anything else is an error."""

    # strict: YAML has typed the values already, and lax coercion would make 1.0 of `true`.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


class Model(Section):
    """The policy: where it comes from and in which precision it runs."""

    path: str = "demo"
    """Hugging Face model folder (config.json, safetensors, tokenizer), or `demo`, the small model shipped with the package."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; null takes the model's."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the weights and activations, in training and in the rollout."""


class Data(Section):
    """Where prompts come from. Files are .jsonl or .parquet with a column `prompt` or `messages`; other columns go to the rewards."""

    train_files: str | list[str] = "demo"
    """A file, a list of files, `reasoning_gym:<task>`, or `demo`, the arithmetic task shipped with the package."""
    val_files: str | list[str] | None = None
    """Held-out problems for evaluation, given like train_files; null evaluates nothing."""
    prompt_key: str = "prompt"
    """Column of the prompt text (used where a row has no `messages`)."""
    answer_key: str = "answer"
    """Column of the reference answer; rewards receive it as `answer`."""
    apply_chat_template: bool | Auto = "auto"
    """Wrap a plain prompt as a user message in the tokenizer's chat template; `auto` does when the tokenizer has one."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    prompt_suffix: str = ""
    """Text appended to every plain prompt (an instruction such as how to mark the answer)."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What happens to a longer one: dropped, cut on the left, or an error. Counted and shown either way."""
    bad_rows: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be used: an error that names files and lines, or a warning that does."""
    shuffle: bool = True
    """Draw the prompts of every epoch in a new order that depends on trainer.seed alone."""
    reasoning_gym_size: Count = 2000
    """Number of problems drawn of a reasoning-gym task (train and validation use different seeds)."""
    reasoning_gym_config: dict[str, float | int | str | bool] = {}
    """Settings of the reasoning-gym task, such as {min_terms: 2, max_terms: 3}."""


class Rollout(Section):
    """How responses are sampled. Engine keys have vLLM's names and meaning."""

    num_prompts_per_step: Count = 32
    """Prompts of one step, over all ranks."""
    num_samples_per_prompt: Count = 8
    """Responses to each prompt: the group that rewards are normalised over."""
    max_response_length: Count = 256
    """Longest response in tokens; longer ones are cut and count as truncated."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the rollout distribution is no longer the trained one."""
    top_k: NonNegative = 0
    """Sample from the k likeliest tokens; 0 for all."""
    stop: list[str] = []
    """Texts that end a response, besides the tokenizer's end-of-sequence token."""
    tensor_parallel_size: Count = 1
    """Ranks of one engine; independent of the actor's layout. Must divide the number of processes per node."""
    enable_expert_parallel: bool = False
    """Spread the experts of a MoE model over the engine's ranks instead of slicing each."""
    kv_cache_memory_bytes: Bytes | Auto = "auto"
    """Memory of one rank's KV cache; `auto` takes what all requests of a step need, up to what the device has left."""
    max_num_seqs: Count = 512
    """Most sequences the engine decodes at once."""
    max_num_batched_tokens: Count | None = None
    """Most tokens of one engine iteration; null leaves it to vLLM."""
    enforce_eager: bool = False
    """Decode without CUDA graphs: slower, but starts at once."""
    logprob_fraction: Fraction | Auto = "auto"
    """Share of the requests whose log-probabilities the engine returns, to measure its agreement with the trainer.
    `auto`: 1 on CPU, 0.125 on GPU."""


class Reward(Section):
    """How responses are scored."""

    functions: dict[str, float] = {"math_answer": 1.0}
    """Reward function -> weight. A function is math_answer, format, reasoning_gym, `package.module:function` or `path/file.py:function`."""
    format_pattern: str = r"(?s).*\\boxed\{.+\}.*"
    """Regular expression that a response must match in full to earn the `format` reward."""
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Time for one math answer to be parsed and compared; one that takes longer scores 0 and is counted."""
    num_workers: Count = 2
    """Processes per scoring rank for math_answer."""
    max_failure_fraction: Fraction = 0.1
    """The run stops when more than this share of a step's calls of a reward function raises; fewer score 0 and are counted."""


class Algorithm(Section):
    """What is optimised."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """grpo: (r - mean) / (std + eps) within the group; dr_grpo: r - mean; rloo: r - mean of the others."""
    advantage_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """eps of grpo."""
    clip_ratio_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The probability ratio is clipped at 1 - this."""
    clip_ratio_high: Annotated[float, Field(ge=0)] = 0.2
    """The probability ratio is clipped at 1 + this."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term against the reference (the initial weights) in the loss; 0 keeps no reference at all."""
    kl_estimator: Literal["low_var_kl", "k1", "k2", "k3", "abs"] = "low_var_kl"
    """low_var_kl is k3 with the log-ratio clamped before exp and the result clamped."""
    loss_aggregation: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number."""
    num_epochs: Count = 1
    """Passes over the samples of a step (verl: ppo_epochs)."""
    num_mini_batches: Count = 1
    """Optimizer steps per pass; 1 with one epoch is strictly on-policy."""


class OverrideTransformerConfig(BaseModel):
    """Fields of Megatron's TransformerConfig, by name. The fusions are listed; any other field may be added."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, use_attribute_docstrings=True)

    masked_softmax_fusion: bool | Auto = "auto"
    """Fused scale, mask and softmax of the unfused attention (apex kernels, or TransformerEngine's)."""
    bias_activation_fusion: bool | Auto = "auto"
    """Fused bias and activation in the MLP (SwiGLU, GeLU)."""
    bias_dropout_fusion: bool | Auto = "auto"
    """Fused bias, dropout and residual."""
    gradient_accumulation_fusion: bool | Auto = "auto"
    """Weight gradients added to the fp32 buffer inside the matrix product (apex kernel, or TransformerEngine's)."""
    apply_rope_fusion: bool | Auto = "auto"
    """Fused rotary embedding (TransformerEngine)."""


class Actor(Section):
    """The Megatron-Core model that is trained: its parallel layout, memory and kernels. Megatron's names."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages that share the layers."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Model chunks per stage (interleaved schedule)."""
    context_parallel_size: Count = 1
    """Ranks that share every sequence; only 1 is supported yet."""
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts of a MoE model."""
    expert_tensor_parallel_size: Count = 1
    """Ranks that share every expert."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks outside the matrix products."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first stage when stages are uneven."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last stage when stages are uneven."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    max_tokens_per_micro_batch: Count = 8192
    """Token budget of one forward pass; sequences are packed up to it without padding. One sequence may exceed it alone."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass."""
    param_offload: bool = False
    """Keep the weights on the host while the engine generates."""
    grad_offload: bool = False
    """Free the gradient buffers while the engine generates."""
    optimizer_offload: bool = False
    """Keep the optimizer state on the host while it is not needed."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Megatron's layer spec; `auto` takes transformer_engine on a GPU that has it."""
    override_transformer_config: OverrideTransformerConfig = OverrideTransformerConfig()
    """Fields of Megatron's TransformerConfig set by hand; `auto` turns a fusion on where its kernels exist."""


class Optimizer(Section):
    """Adam or SGD, and the learning-rate schedule. Megatron's names."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Update rule; sgd needs actor.use_distributed_optimizer=false."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (not on norms and biases)."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """First-moment decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Second-moment decay."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""


class WeightSync(Section):
    """How the trained weights reach the engine."""

    bucket_bytes: Bytes = 512 * 2**20
    """Weights are streamed in buckets that take this much extra memory; one larger parameter travels alone."""
    verify: Literal["never", "first", "always"] = "first"
    """After which syncs every tensor the engine holds is compared with the trainer's."""


class Evaluation(Section):
    """Held-out accuracy, measured on data.val_files."""

    every_n_steps: NonNegative = 10
    """Steps between evaluations; 0 evaluates only before and after training."""
    at_start_and_end: bool = True
    """Evaluate before the first step and after the last."""
    max_prompts: Count | None = None
    """Evaluate on the first so many problems; null takes all."""
    num_samples_per_prompt: Count = 1
    """Responses per problem (mean@k, pass@k)."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""


class Trainer(Section):
    """The run as a whole."""

    name: str | None = None
    """Name of the run; null makes one of the model and the time."""
    runs_dir: str = "runs"
    """The run writes to <runs_dir>/<name>."""
    total_steps: Count = 100
    """GRPO steps."""
    seed: NonNegative = 0
    """Seed of the data order, the sampling and the initialisation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder to <run>/hf."""


class Logging(Section):
    """What is written where. metrics.jsonl and the log files are always written."""

    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Where metrics go besides <run>/metrics.jsonl."""
    wandb_project: str = "megagrpo"
    """Project of the wandb tracker."""
    samples_every_n_steps: NonNegative = 10
    """Steps between tables of sample responses on the console; 0 prints none."""
    rollouts_every_n_steps: NonNegative = 1
    """Steps between written rollouts (<run>/rollouts/step_*.jsonl); 0 writes none."""


class Config(Section):
    """The whole configuration of a run."""

    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    actor: Actor = Actor()
    optimizer: Optimizer = Optimizer()
    weight_sync: WeightSync = WeightSync()
    evaluation: Evaluation = Evaluation()
    trainer: Trainer = Trainer()
    logging: Logging = Logging()
