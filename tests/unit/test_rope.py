"""Rotary frequencies equal those transformers computes, for every scaling and for config files of both ages."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megagrpo.hf_mapping.rope import rope_of

BASE = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-other-factors": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 5.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-turns": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-not-truncated": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 0.7},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(scaling, theta):
    new = {**BASE, "rope_parameters": {**scaling, "rope_theta": theta}}
    old = {**BASE, "rope_theta": theta, "rope_scaling": {"type": scaling["rope_type"], **scaling}}
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](transformers.LlamaConfig(**new), device="cpu")
    for config in (new, old):
        rope = rope_of(config, 16)
        torch.testing.assert_close(rope.inverse_frequencies, frequencies, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}])
def test_unscaled_frequencies(config):
    rope = rope_of({**BASE, **config}, 16)
    torch.testing.assert_close(rope.inverse_frequencies, 10000.0 ** -(torch.arange(8) / 8))
    assert (rope.attention_factor, rope.rotated_share) == (1.0, 1.0)


def test_a_part_of_the_head():
    rope = rope_of({**BASE, "partial_rotary_factor": 0.5}, 16, interleaved=True)
    assert rope.inverse_frequencies.shape == (4,)
    assert rope.rotated_share == 0.5 and rope.interleaved


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_an_unknown_scaling_is_refused(kind):
    with pytest.raises(ValueError, match=f"rope_type '{kind}' is not supported: default, linear, llama3, yarn are"):
        rope_of({**BASE, "rope_scaling": {"type": kind, "factor": 2.0}}, 16)
