"""Tiny random models that vLLM loads too, and runs of the real stack on them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # torchrun.py

_SHAPE = {
    "vocab_size": 32,  # the demo tokenizer's
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3_moe": {"tie_word_embeddings": False, **_EXPERTS},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders in fp32 with the demo's tokenizer: llama (tied), qwen2 (QKV bias, untied), qwen3_moe."""
    import shutil

    import torch
    import transformers

    from megagrpo.demo import MODEL_DIR

    root = tmp_path_factory.mktemp("e2e_models")
    for model_type, settings in _MODELS.items():
        config = transformers.AutoConfig.for_model(model_type, **_SHAPE, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=0.15, generator=generator)
                if "norm" in name:
                    parameter.add_(1.0)
        model.save_pretrained(root / model_type)
        for file in MODEL_DIR.glob("token*"):
            shutil.copy(file, root / model_type / file.name)
    return {name: root / name for name in _MODELS}
