"""Tiny random models of every family, and samples to run through them. The same numbers in every process."""

from pathlib import Path

import numpy as np
import torch
import transformers

from megagrpo.types import Sample

VOCAB_SIZE = 101  # odd: padded under tensor parallelism
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8}
CONFIGS = {
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-8-layers": ("llama", {"tie_word_embeddings": False, "num_hidden_layers": 8}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "max_position_embeddings": 32}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"tie_word_embeddings": False, **_EXPERTS}),
    "qwen3-moe-unnormalised": ("qwen3_moe", {"tie_word_embeddings": False, **_EXPERTS, "norm_topk_prob": False}),
}


def write_model(name: str, folder: Path) -> None:
    """A Hugging Face folder in fp32, with weights large enough for every part of the model to matter."""
    model_type, settings = CONFIGS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**_COMMON, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.25, generator=generator)
            if "norm" in parameter_name:
                parameter.add_(1.0)
    model.save_pretrained(folder)


def make_samples(num_samples: int = 12) -> list[Sample]:
    """Samples of differing lengths."""
    rng = np.random.default_rng(0)

    def tokens(longest: int) -> np.ndarray:
        return rng.integers(0, VOCAB_SIZE, int(rng.integers(1, longest))).astype(np.int32)

    return [Sample(i, i // 2, i // 2, tokens(8), tokens(20), None, "stop") for i in range(num_samples)]


def make_weights(num_samples: int = 12) -> np.ndarray:
    """The weight of every sample's tokens in the loss, [num_samples]."""
    return np.random.default_rng(1).uniform(0.1, 1.0, num_samples)
