"""What batching promises, over random samples; and packs, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.batching import make_mini_batches, pack, plan_micro_batches, split_mini_batches
from megagrpo.config.schema import Actor, Algorithm, Config
from megagrpo.types import Sample

CPU = torch.device("cpu")


def make_sample(id, prompt, response, *, group=0, rollout_logprobs=None):
    return Sample(
        id=id,
        group=group,
        prompt_id=group,
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        rollout_logprobs=rollout_logprobs,
        finish_reason="stop",
    )


plans = {
    "lengths": st.lists(st.integers(1, 500), max_size=60),
    "dp_size": st.integers(1, 5),
    "max_tokens": st.integers(1, 2000),
    "multiple_of": st.integers(1, 4),
}


@settings(deadline=None, max_examples=300)
@given(**plans)
def test_plan_keeps_its_promises(lengths, dp_size, max_tokens, multiple_of):
    arguments = {"dp_size": dp_size, "max_tokens": max_tokens, "multiple_of": multiple_of}
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_micro_batches(lengths, **arguments)
    bins = [chosen for rank in plan for chosen in rank]

    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    assert all(len(chosen) <= 1 or lengths[chosen].sum() <= max_tokens for chosen in bins)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    assert len(plan[0]) > 0
    assert sum(not chosen for chosen in bins) == max(len(bins) - len(lengths), 0)
    if len(lengths) >= dp_size:
        assert all(any(rank) for rank in plan)
    assert plan == plan_micro_batches(lengths, **arguments)


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 300), min_size=200, max_size=400), dp_size=st.integers(1, 8))
def test_many_samples_fill_the_budget_and_are_balanced(lengths, dp_size):
    lengths = np.array(lengths)
    plan = plan_micro_batches(lengths, dp_size=dp_size, max_tokens=1200)
    assert len(plan[0]) <= -(-lengths.sum() * 4 // (3 * 1200 * dp_size)) + 1  # LPT: at most 4/3 of what an ideal packing needs
    tokens = [sum(lengths[chosen].sum() for chosen in rank) for rank in plan]
    assert max(tokens) - min(tokens) <= 300  # one sample


def test_ranks_are_balanced_by_attention_too():
    # By tokens alone one rank would get both long ones (32 + 30 thousand against 31 + 31), at nearly twice the other's cost.
    lengths = np.array([32_000, 30_000] + [7_750] * 8)
    plan = plan_micro_batches(lengths, dp_size=2, max_tokens=32_000)
    assert [sum(lengths[chosen].max() >= 30_000 for chosen in rank) for rank in plan] == [1, 1]


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    assert sorted(plan_micro_batches(np.array([5, 9]), dp_size=4, max_tokens=100)) == [[[]], [[]], [[0]], [[1]]]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 5))
def test_mini_batches_are_whole_groups(groups, num_mini_batches):
    groups = np.array(groups)
    if len(np.unique(groups)) < num_mini_batches:
        with pytest.raises(AssertionError, match="cannot fill"):
            split_mini_batches(groups, num_mini_batches)
        return
    parts = split_mini_batches(groups, num_mini_batches)
    assert sorted(np.concatenate(parts)) == list(range(len(groups)))
    members = [set(groups[part]) for part in parts]
    assert sum(len(each) for each in members) == len(set(groups))
    assert max(map(len, members)) - min(map(len, members)) <= 1


def test_pack_token_by_token():
    samples = [
        make_sample(10, [5, 6], [7, 8], rollout_logprobs=np.array([-0.25, -0.5], dtype=np.float32)),
        make_sample(11, [1], [2]),
        make_sample(12, [3, 3, 3], [4]),
    ]
    batch = pack(samples, [2, 0], np.array([1.0, 2.0, -3.0]), np.array([0.1, 0.2, 0.3]), pad_to_multiple_of=5, device=CPU)
    assert batch.sample_ids == (12, 10)
    assert batch.token_ids.tolist() == [3, 3, 3, 4, 5, 6, 7, 8, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 10]
    assert batch.max_seqlen == 4
    assert batch.mask.tolist() == [False, False, True, False, False, True, True, False, False, False]
    assert batch.target_ids[batch.mask].tolist() == [4, 7, 8]
    assert batch.advantages[batch.mask].tolist() == [-3.0, 1.0, 1.0]
    np.testing.assert_allclose(batch.weights[batch.mask], [0.3, 0.1, 0.1])
    assert batch.rollout_logprobs[batch.mask][1:].tolist() == [-0.25, -0.5]
    assert batch.rollout_logprobs[batch.mask][0].isnan()
    types = {name: getattr(batch, name).dtype for name in ("token_ids", "position_ids", "target_ids", "cu_seqlens", "weights", "mask")}
    assert list(types.values()) == [torch.int64, torch.int64, torch.int64, torch.int32, torch.float32, torch.bool]


def test_a_pack_without_samples_is_a_dummy():
    batch = pack([], [], np.zeros(0), np.zeros(0), pad_to_multiple_of=4, device=CPU)
    assert batch.token_ids.tolist() == [0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert batch.sample_ids == ()
    assert not batch.mask.any()
    assert not batch.weights.any()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), num_groups=st.integers(2, 6), dp_size=st.integers(1, 4), multiple_of=st.integers(1, 2))
def test_ranks_together_train_every_response_token_once_with_weights_of_the_step(data, num_groups, dp_size, multiple_of):
    samples = [
        make_sample(
            i, range(1, 1 + data.draw(st.integers(1, 9))), [100 * i + t for t in range(data.draw(st.integers(1, 30)))], group=i // 3
        )
        for i in range(3 * num_groups)
    ]
    advantages = np.arange(len(samples), dtype=float)
    config = Config(algorithm=Algorithm(num_mini_batches=2), actor=Actor(max_tokens_per_micro_batch=50))
    ranks = [
        make_mini_batches(
            samples, advantages, config, dp_rank=rank, dp_size=dp_size, device=CPU, pad_to_multiple_of=2, multiple_of=multiple_of
        )
        for rank in range(dp_size)
    ]
    steps = [[batch for rank in ranks for batch in rank[step]] for step in range(2)]
    assert [{s.group for s in samples for b in step for i in b.sample_ids if s.id == i} for step in steps] == [
        set(range(-(-num_groups // 2))),
        set(range(-(-num_groups // 2), num_groups)),
    ]
    for step in steps:
        assert sum(batch.weights.sum().item() for batch in step) == pytest.approx(1, rel=1e-5)
    trained = [
        (target, advantage)
        for step in steps
        for batch in step
        for target, advantage in zip(batch.target_ids[batch.mask].tolist(), batch.advantages[batch.mask].tolist(), strict=True)
    ]
    assert sorted(trained) == sorted((token, float(s.id)) for s in samples for token in s.response_ids.tolist())
    assert all(len(batch.token_ids) % 2 == 0 and batch.cu_seqlens[-1] == len(batch.token_ids) for step in steps for batch in step)
