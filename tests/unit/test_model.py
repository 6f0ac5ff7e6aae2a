"""A Hugging Face config becomes Megatron's: what is carried over, what is refused, and which fusions are chosen.

That the models built from it compute what Hugging Face's do, tests/distributed/test_layouts.py shows.
"""

import pytest
import torch

from megagrpo.config.schema import Actor, Config
from megagrpo.mcore.layer_spec import uses_transformer_engine
from megagrpo.mcore.parallel import Parallel
from megagrpo.mcore.transformer_config import resolve_fusions, transformer_config

CPU = torch.device("cpu")
HF = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SIZES = {f"{kind}_{what}": int(what == "size") for kind in ("tp", "pp", "cp", "dp", "ep", "etp") for what in ("rank", "size")}
ALONE = Parallel(rank=0, world_size=1, device=CPU, vpp_size=1, tp_group=None, **SIZES)


def make_config(**actor):
    return Config.model_validate({"model": {"dtype": "float32"}, "actor": actor})


def test_fields_are_carried_over():
    made = transformer_config({**HF, "model_type": "qwen2", "head_dim": 16}, make_config(), ALONE)
    assert (made.num_layers, made.hidden_size, made.num_query_groups, made.kv_channels) == (4, 32, 2, 16)
    assert made.add_qkv_bias and not made.add_bias_linear and not made.qk_layernorm
    assert made.layernorm_epsilon == 1e-5 and made.params_dtype == torch.float32 and not made.bf16


def test_any_field_of_transformer_config_can_be_overridden():
    config = make_config(override_transformer_config={"softmax_scale": 0.5, "layernorm_epsilon": 1e-4})
    made = transformer_config(HF, config, ALONE)
    assert (made.softmax_scale, made.layernorm_epsilon) == (0.5, 1e-4)


def test_an_unknown_override_is_named_with_its_neighbour():
    config = make_config(override_transformer_config={"softmax_scales": 0.5})
    with pytest.raises(ValueError, match="softmax_scales is no field .*did you mean softmax_scale?"):
        transformer_config(HF, config, ALONE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),  # its output projection has one, Megatron's would not
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_megatron_cannot_express_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        transformer_config({**HF, **changes}, make_config(), ALONE)


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({}, {"rotary_base": 10000.0}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rotary_base": 1e6}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rotary_base": 1e6}),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rotary_base": 1e6, "seq_len_interpolation_factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 32.0}),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 32.0}),
    ],
)
def test_rope_of_old_and_new_config_files(hf, expected):
    assert rotary_arguments(hf) == {"rotary_percent": 1.0, **expected}


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, {**LLAMA3, "low_freq_factor": 2.0}])
def test_other_rope_is_refused(scaling):
    with pytest.raises(ValueError, match="rope scaling .* is not supported"):
        rotary_arguments({"rope_theta": 1e6, "rope_scaling": scaling})


def test_no_kernel_no_fusion_on_cpu():
    assert not any(resolve_fusions(Actor(), CPU).values())


def test_a_fusion_without_its_kernels_is_refused():
    asked = Actor.model_validate({"override_transformer_config": {"masked_softmax_fusion": True}})
    with pytest.raises(ValueError, match="masked_softmax_fusion=true needs .*apex"):
        resolve_fusions(asked, CPU)
    plain = Actor.model_validate({"override_transformer_config": {"bias_activation_fusion": True}})
    assert resolve_fusions(plain, CPU)["bias_activation_fusion"] is True, "compiled by torch, it needs none"


def test_transformer_engine_is_refused_on_cpu():
    assert not uses_transformer_engine(Actor(), CPU)
    with pytest.raises(ValueError, match="set actor.transformer_impl=local"):
        uses_transformer_engine(Actor(transformer_impl="transformer_engine"), CPU)
