"""The mapping tables: every transform undoes itself bit for bit, places every head where Megatron reads it, and names every tensor."""

import pytest
import torch
import transformers

from megagrpo.hf_mapping.families import FAMILIES, mapping_for
from megagrpo.hf_mapping.transforms import GatedMLP, QueryKeyValue, Replicated, Sliced, Vocabulary

LAYOUTS = [(16, 2, 2), (32, 8, 8), (8, 8, 2), (64, 2, 2), (9, 3, 3), (4, 2, 1)]  # heads, KV heads, tensor parallel size


def shards(transform, tensors, size):
    return [transform.to_megatron(tensors, rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize(("heads", "groups", "size"), LAYOUTS)
@pytest.mark.parametrize("rest", [(5,), ()], ids=["weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qkv_round_trip(heads, groups, size, rest, dtype):
    dim = 3
    q, k, v = (torch.randn(n * dim, *rest).to(dtype) for n in (heads, groups, groups))
    transform = QueryKeyValue(heads, groups, dim)
    parts = shards(transform, [q, k, v], size)
    assert all(part.shape[0] == (heads + 2 * groups) * dim // size for part in parts)
    for back, original in zip(transform.to_hf(parts), [q, k, v], strict=True):
        assert torch.equal(back, original)


def test_qkv_order_is_megatrons():
    """Four query heads, two KV heads, head size 1: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1."""
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    first, second = shards(QueryKeyValue(4, 2, 1), [q, k, v], 2)
    assert first.tolist() == [0, 1, 10, 20]
    assert second.tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlp_round_trip(size):
    gate, up = torch.randn(8, 5), torch.randn(8, 5)
    parts = shards(GatedMLP(), [gate, up], size)
    assert torch.equal(parts[0], torch.cat([gate[: 8 // size], up[: 8 // size]])), "a rank holds its gate above its up"
    assert [torch.equal(a, b) for a, b in zip(GatedMLP().to_hf(parts), [gate, up], strict=True)] == [True, True]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sliced_round_trip(axis, size):
    weight = torch.randn(8, 12)
    assert torch.equal(Sliced(axis).to_hf(shards(Sliced(axis), [weight], size))[0], weight)


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 2), (10, 4), (7, 4), (5, 4)])
def test_vocabulary_is_padded_with_zeros_and_cut_again(vocab, size):
    embedding = torch.randn(vocab, 3)
    parts = shards(Vocabulary(vocab), [embedding], size)
    rows = -(-vocab // size)
    assert all(part.shape == (rows, 3) for part in parts)
    assert torch.cat(parts)[vocab:].abs().sum() == 0
    assert torch.equal(Vocabulary(vocab).to_hf(parts)[0], embedding)


def test_replicated_takes_the_first_copy():
    weight = torch.randn(4)
    assert torch.equal(Replicated().to_hf([weight])[0], weight)


def config(model_type, **changes):
    shape = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 11, "tie_word_embeddings": False}
    return {"model_type": model_type, **shape, **changes}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_row_has_its_own_names(model_type):
    """But for the head of a tied model, which is the embedding, and the norm before an MLP, dense or of experts."""
    hf = transformers.AutoConfig.for_model(model_type).to_dict()
    rows = mapping_for(hf).rows
    assert len({row.megatron for row in rows}) == len(rows)
    names = [name for row in rows for name in row.hf]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated <= {"model.embed_tokens.weight", "model.layers.{layer}.post_attention_layernorm.weight"}


def test_names_are_filled_in():
    place = mapping_for(config("qwen3_moe")).locate("decoder.layers.11.mlp.experts.3.linear_fc1.weight")
    assert place.row.expert and place.expert is None
    assert place.hf_names == ("model.layers.11.mlp.experts.3.gate_proj.weight", "model.layers.11.mlp.experts.3.up_proj.weight")


def test_known_hugging_face_tensors():
    mapping = mapping_for(config("llama", tie_word_embeddings=False))
    assert mapping.knows("model.layers.3.mlp.up_proj.weight") and mapping.knows("lm_head.weight")
    assert not mapping.knows("model.layers.3.mlp.up_proj.bias") and not mapping.knows("model.layers.x.mlp.up_proj.weight")


def test_tied_head_reads_the_embedding():
    mapping = mapping_for(config("llama", tie_word_embeddings=True))
    assert mapping.locate("output_layer.weight").hf_names == ("model.embed_tokens.weight",)


def test_unknown_model_type_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"'qwen2_5' is not supported; did you mean qwen2.*supported are llama"):
        mapping_for(config("qwen2_5"))
