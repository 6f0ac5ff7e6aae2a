"""Packed attention against a naive float64 softmax over every query and key, forward and backward."""

import math

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.mcore.attention import PackedAttention

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = [5, 1, 9, 2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLAVOURS = {
    "plain": ({}, {}),
    "softmax scale": ({}, {"softmax_scale": 0.7}),
    "window": ({"window_size": (3, 0)}, {}),
    "softcap": ({}, {"softcap": 1.5}),
    "sinks": ({"softmax_type": "learnable"}, {}),
    "window, softcap and sinks": ({"window_size": (2, 0), "softmax_type": "learnable"}, {"softcap": 2.0}),
}


def make_attention(group, dtype=torch.float32, settings=None, arguments=None):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        init_method=torch.nn.init.normal_,
        **(settings or {}),
    )
    return PackedAttention(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=ProcessGroupCollection(tp=group),
        **(arguments or {}),
    )


def make_inputs(dtype=torch.float32, v_dim=DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, DIM), (GROUPS, DIM), (GROUPS, v_dim)]
    inputs = [torch.randn(sum(LENGTHS), *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [x.requires_grad_() for x in inputs]


def packed(lengths):
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def naive(q, k, v, attention, window=None):
    """One query at a time: its scores over the keys it may see, softmax with the sink in the denominator, weighted values."""
    start, rows = 0, []
    for length in LENGTHS:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window)
            for head in range(HEADS):
                keys, values = (x[first : t + 1, head * GROUPS // HEADS].double() for x in (k, v))
                scores = keys @ q[t, head].double() * attention.softmax_scale
                if attention.softcap is not None:
                    scores = attention.softcap * torch.tanh(scores / attention.softcap)
                largest = scores.max()
                exp = torch.exp(scores - largest)
                total = exp.sum()
                if attention.softmax_offset is not None:
                    total = total + torch.exp(attention.softmax_offset[head].double() - largest)
                rows.append(exp @ values / total)
        start += length
    return torch.stack(rows).reshape(sum(LENGTHS), -1)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_packed_equals_naive(world_of_one, flavour):
    settings, arguments = FLAVOURS[flavour]
    attention = make_attention(world_of_one, settings=settings, arguments=arguments)
    inputs = make_inputs()
    leaves = [*inputs, *attention.parameters()]
    got = attention(*inputs, None, packed_seq_params=packed(LENGTHS))
    expected = naive(*inputs, attention, window=settings.get("window_size", (None,))[0])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)

    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got_grads = torch.autograd.grad((got * weight).sum(), leaves)
    for grad, reference in zip(got_grads, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("v_dim", [4, 12])
def test_values_of_another_width_than_keys(world_of_one, v_dim):
    attention = make_attention(world_of_one, arguments={"k_channels": DIM, "v_channels": v_dim})
    inputs = make_inputs(v_dim=v_dim)
    got = attention(*inputs, None, packed_seq_params=packed(LENGTHS))
    assert got.shape == (sum(LENGTHS), HEADS * v_dim)
    torch.testing.assert_close(got.double(), naive(*inputs, attention), rtol=1e-5, atol=1e-6)


def test_k_channels_set_the_scale(world_of_one):
    assert make_attention(world_of_one).softmax_scale == pytest.approx(1 / math.sqrt(DIM))
    assert make_attention(world_of_one, arguments={"k_channels": 16}).softmax_scale == 0.25


@pytest.mark.parametrize("flavour", ["plain", "window, softcap and sinks"])
def test_bfloat16(world_of_one, flavour):
    settings, arguments = FLAVOURS[flavour]
    attention = make_attention(world_of_one, torch.bfloat16, settings, arguments)
    inputs = make_inputs(torch.bfloat16)
    got = attention(*inputs, None, packed_seq_params=packed(LENGTHS))
    assert got.dtype == torch.bfloat16
    expected = naive(*inputs, attention, window=settings.get("window_size", (None,))[0])
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_padded_batch_equals_packed(world_of_one, flavour):
    settings, arguments = FLAVOURS[flavour]
    attention = make_attention(world_of_one, settings=settings, arguments=arguments)
    q, k, v = (x.detach()[:16] for x in make_inputs())
    alone = attention(q, k, v, None, packed_seq_params=packed([8, 8]))
    batch = [x.unflatten(0, (2, 8)).transpose(0, 1) for x in (q, k, v)]  # [S, B, heads, d]
    torch.testing.assert_close(attention(*batch, None).transpose(0, 1).flatten(0, 1), alone, rtol=1e-5, atol=1e-6)


def test_a_sequence_does_not_see_the_others(world_of_one):
    """NaN in one sequence stays there, forward and backward."""
    attention = make_attention(world_of_one)
    inputs = make_inputs()
    poisoned = [x.detach().index_fill(0, torch.arange(5, 6, device=DEVICE), math.nan).requires_grad_() for x in inputs]
    clean = torch.arange(sum(LENGTHS), device=DEVICE) != 5
    got, expected = (attention(*x, None, packed_seq_params=packed(LENGTHS)) for x in (poisoned, inputs))
    assert torch.equal(got[clean], expected[clean])
    for x, grad in zip(poisoned, torch.autograd.grad(got[clean].sum(), poisoned), strict=True):
        assert torch.isfinite(grad[clean]).all(), x.shape


@pytest.mark.parametrize("settings", [{"attention_dropout": 0.1}, {"apply_query_key_layer_scaling": True}])
def test_settings_it_does_not_implement_are_refused(world_of_one, settings):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, masked_softmax_fusion=False, **settings)
    config.attention_dropout = settings.get("attention_dropout", 0.0)
    with pytest.raises(ValueError, match="not implemented in the local layer spec"):
        PackedAttention(
            config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            pg_collection=ProcessGroupCollection(tp=world_of_one),
        )
