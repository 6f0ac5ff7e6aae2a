"""A Hugging Face config becomes Megatron's: what is carried over, what is refused, and which fusions are chosen.

That the models built from it compute what Hugging Face's do, tests/distributed/test_layouts.py shows.
"""

import pytest
import torch

from megagrpo.config.schema import Actor, Config
from megagrpo.hf_mapping.families import family_of
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


def transformer_of(hf, config):
    return transformer_config(family_of(hf).architecture(hf), config, ALONE)


def test_fields_are_carried_over():
    made = transformer_of({**HF, "model_type": "qwen2", "head_dim": 16}, make_config())
    assert (made.num_layers, made.hidden_size, made.num_query_groups, made.kv_channels) == (4, 32, 2, 16)
    assert made.add_qkv_bias and not made.add_bias_linear and not made.qk_layernorm
    assert made.layernorm_epsilon == 1e-5 and made.params_dtype == torch.float32 and not made.bf16


def test_any_field_of_transformer_config_can_be_overridden():
    config = make_config(override_transformer_config={"softmax_scale": 0.5, "layernorm_epsilon": 1e-4})
    made = transformer_of(HF, config)
    assert (made.softmax_scale, made.layernorm_epsilon) == (0.5, 1e-4)


def test_an_unknown_override_is_named_with_its_neighbour():
    config = make_config(override_transformer_config={"softmax_scales": 0.5})
    with pytest.raises(ValueError, match="softmax_scales is no field .*did you mean softmax_scale?"):
        transformer_of(HF, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),  # its output projection has one, Megatron's would not
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope' is not supported: default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5}, "only a part of each head"),
    ],
)
def test_what_megatron_cannot_express_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        transformer_of({**HF, **changes}, make_config())


ALTERNATING = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("hf", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, [1, 1, 1, 1]),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, [0, 1, 1, 1]),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [0, 1, 0, 1],
        ),
    ],
)
def test_sliding_windows(hf, windowed):
    made = transformer_of({**HF, **hf}, make_config())
    assert made.window_attn_skip_freq == windowed
    assert made.window_size == ((4, 0) if windowed else None), "a token sees itself and the four before it"


def test_layers_with_experts():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    made = transformer_of({**HF, "model_type": "qwen3_moe", **experts}, make_config())
    assert made.moe_layer_freq == [0, 1, 0, 0]


def test_attention_factor_of_the_rope_scales_the_logits():
    made = transformer_of({**HF, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, make_config())
    assert made.softmax_scale == pytest.approx(1.5**2 / 8**0.5)


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
