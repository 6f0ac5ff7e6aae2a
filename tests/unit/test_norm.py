"""RMSNorm against float64, its rounding, and the flag by which Megatron finds its weight under sequence parallelism."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.mcore.norm import RMSNorm

HIDDEN = 32


def make_norm(dtype=torch.float32, **settings):
    norm = RMSNorm(TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=dtype, **settings), HIDDEN, 1e-5)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    return norm


def reference(x, gamma, eps=1e-5):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gamma


@pytest.mark.parametrize("zero_centered", [False, True])
def test_forward_and_backward_equal_float64(zero_centered):
    norm = make_norm(layernorm_zero_centered_gamma=zero_centered)
    x = torch.randn(3, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got, expected = norm(x), reference(x, norm.weight.double() + zero_centered)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    leaves = [x, norm.weight]
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    for grad, wanted in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (got, expected)), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


def test_a_fresh_norm_only_normalises():
    x = torch.randn(4, HIDDEN)
    config = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4}
    plain, centered = (RMSNorm(TransformerConfig(**config, layernorm_zero_centered_gamma=z), HIDDEN) for z in (False, True))
    assert torch.equal(plain(x), centered(x))
    torch.testing.assert_close(plain(x).square().mean(-1), torch.ones(4), rtol=1e-4, atol=0)


def test_bfloat16_rounds_as_hugging_face_does():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, oracle = make_norm(torch.bfloat16), LlamaRMSNorm(HIDDEN, eps=1e-5).bfloat16()
    oracle.weight.data.copy_(norm.weight.data)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(norm(x), oracle(x))


def test_zero_centered_gamma_keeps_small_weights_in_bfloat16():
    """1 + 2^-9 is 1 in bf16: the weight must not be rounded before the product is."""
    norm = make_norm(torch.bfloat16, layernorm_zero_centered_gamma=True)
    norm.weight.data.fill_(2.0**-9)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(norm(x), reference(x, 1 + 2.0**-9).float().bfloat16())
    assert not torch.equal(norm(x), reference(x, 1.0).float().bfloat16())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_weight_says_whether_its_gradient_is_partial(sequence_parallel):
    norm = make_norm(sequence_parallel=sequence_parallel, tensor_model_parallel_size=2)
    assert norm.weight.sequence_parallel is sequence_parallel
