"""The loss against an independent float64 reference, published values, finite differences, and poisoned masked slots."""

import math

import numpy as np
import pytest
import torch

from megagrpo.config.schema import Algorithm
from megagrpo.loss import KL_ESTIMATORS, grpo_loss, kl_k3, kl_low_var, policy_loss, step_metrics, token_weights
from megagrpo.types import MicroBatch

T = 24


def make_micro_batch(seed=0):
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random(T) < 0.6)
    return MicroBatch(
        token_ids=torch.zeros(T, dtype=torch.int64),
        position_ids=torch.arange(T),
        target_ids=torch.zeros(T, dtype=torch.int64),
        mask=mask,
        advantages=torch.from_numpy(rng.normal(size=T)),
        weights=torch.from_numpy(rng.random(T)),
        rollout_logprobs=torch.from_numpy(-rng.random(T)),
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32),
        max_seqlen=T,
        sample_ids=(0,),
    )


def make_logprobs(seed=1):
    """Current, old and reference log-probabilities, far enough apart that the clip binds on some tokens."""
    rng = np.random.default_rng(seed)
    current = -rng.random(T) * 3
    return (torch.from_numpy(current + shift) for shift in (0, rng.normal(size=T) * 0.4, rng.normal(size=T) * 0.7))


def reference_loss(logprobs, old, ref, batch, algorithm):
    """The formulas once more, token by token in plain Python floats."""
    total = 0.0
    for t in range(T):
        if not batch.mask[t]:
            continue
        advantage, ratio = batch.advantages[t].item(), math.exp(logprobs[t] - old[t])
        clipped = min(max(ratio, 1 - algorithm.clip_ratio_low), 1 + algorithm.clip_ratio_high)
        policy = -min(advantage * ratio, advantage * clipped)
        d = min(max((ref[t] - logprobs[t]).item(), -20), 20)
        kl = min(math.exp(d) - d - 1, 10)
        total += batch.weights[t].item() * (policy + algorithm.kl_coef * kl)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_the_reference(seed):
    batch, (logprobs, old, ref) = make_micro_batch(seed), make_logprobs(seed + 100)
    algorithm = Algorithm(clip_ratio_low=0.2, clip_ratio_high=0.28, kl_coef=0.3)
    loss, _ = grpo_loss(logprobs, None, batch, algorithm, old_logprobs=old, ref_logprobs=ref)
    assert loss.item() == pytest.approx(reference_loss(logprobs, old, ref, batch, algorithm), rel=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradient_equals_finite_differences(estimator):
    batch, (logprobs, old, ref) = make_micro_batch(), make_logprobs()
    algorithm = Algorithm(clip_ratio_high=0.28, kl_coef=0.3, kl_estimator=estimator)

    def loss(logprobs):
        return grpo_loss(logprobs, None, batch, algorithm, old_logprobs=old, ref_logprobs=ref)[0]

    logprobs.requires_grad_()
    loss(logprobs).backward()
    step = 1e-6 * torch.eye(T, dtype=torch.float64)
    with torch.no_grad():
        differences = torch.stack([(loss(logprobs + e) - loss(logprobs - e)) / 2e-6 for e in step])
    torch.testing.assert_close(logprobs.grad, differences, rtol=1e-6, atol=1e-8)
    assert (logprobs.grad[~batch.mask] == 0).all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "slope"),
    [(1, 1.5, -1.28, 0), (1, 0.5, -0.5, -0.5), (-1, 1.5, 1.5, 1.5), (-1, 0.5, 0.8, 0), (1, 1, -1, -1), (-1, 1, 1, 1)],
)
def test_clip_values_and_slopes(advantage, ratio, expected, slope):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([float(advantage)], dtype=torch.float64)
    result = policy_loss(logprobs, zero, advantages, clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(expected)
    assert logprobs.grad.item() == pytest.approx(slope)  # d/dlogprob of -A r is -A r
    assert result.clipped_high.item() == (advantage > 0 and ratio > 1.28)
    assert result.clipped_low.item() == (advantage < 0 and ratio < 0.8)


def test_a_huge_log_ratio_stays_finite():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    result = policy_loss(logprobs, torch.tensor([-100.0, 100.0]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert (logprobs.grad == 0).all()


@pytest.mark.parametrize(
    ("estimator", "difference", "expected"),
    [
        ("low_var_kl", 0.5, 0.1487213),
        ("low_var_kl", -0.5, 0.1065307),
        ("low_var_kl", 3.0, 10),
        ("low_var_kl", 25.0, 10),
        ("low_var_kl", -25.0, 10),
        ("k3", 0.5, 0.1487213),
        ("k3", 3.0, 16.0855369),
        ("k1", 0.5, -0.5),
        ("k2", 0.5, 0.125),
        ("k2", -0.5, 0.125),
        ("abs", -0.5, 0.5),
    ],
)
def test_kl_values(estimator, difference, expected):
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    assert KL_ESTIMATORS[estimator](logprobs, logprobs + difference).item() == pytest.approx(expected, abs=1e-7)


def test_low_var_kl_of_a_reference_far_away_is_ten_without_gradient():
    logprobs = torch.tensor([-100.0, -1.0], requires_grad=True)  # fp32: e^100 would overflow
    kl = kl_low_var(logprobs, torch.tensor([0.0, -101.0]))
    kl.sum().backward()
    assert kl.tolist() == [10.0, 10.0]
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["low_var_kl", "k2", "k3", "abs"])
def test_kl_gradient_pulls_towards_the_reference_without_advantage(estimator):
    batch = make_micro_batch()
    batch.advantages.zero_()
    logprobs = torch.full((T,), -1.0, dtype=torch.float64, requires_grad=True)
    ref = logprobs.detach() + torch.where(torch.arange(T) % 2 == 0, 0.3, -0.3)
    algorithm = Algorithm(kl_coef=0.5, kl_estimator=estimator)
    grpo_loss(logprobs, None, batch, algorithm, old_logprobs=None, ref_logprobs=ref)[0].backward()
    descent = -logprobs.grad[batch.mask]
    assert (descent * (ref - logprobs.detach())[batch.mask] > 0).all()


def test_expected_k3_is_the_kl_divergence_of_a_small_vocabulary():
    logits = torch.tensor([0.1, -0.4, 1.2, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.2, -1.0, 0.3, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    expected = (logprobs.exp() * kl_k3(logprobs, ref)).sum()
    torch.testing.assert_close(expected, exact)
    # the loss's gradient in expectation over sampled tokens (probabilities held fixed), for the estimator that is exact in it: k2
    surrogate = (logprobs.detach().exp() * KL_ESTIMATORS["k2"](logprobs, ref)).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits, retain_graph=True)[0], torch.autograd.grad(exact, logits)[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_slots_of_every_input_change_nothing(poison):
    algorithm = Algorithm(kl_coef=0.3)

    def run(poisoned):
        batch, tensors = make_micro_batch(), [*make_logprobs(), torch.linspace(0, 1, T, dtype=torch.float64)]
        if poisoned:
            for values in [batch.advantages, batch.weights, batch.rollout_logprobs, *tensors]:
                values[~batch.mask] = poison
        logprobs, old, ref, entropy = tensors
        logprobs.requires_grad_()
        loss, sums = grpo_loss(logprobs, entropy, batch, algorithm, old_logprobs=old, ref_logprobs=ref)
        loss.backward()
        return sums, logprobs.grad

    (clean_sums, clean_grad), (sums, grad) = run(poisoned=False), run(poisoned=True)
    assert {name: value.item() for name, value in sums.items()} == {name: value.item() for name, value in clean_sums.items()}
    assert torch.equal(grad, clean_grad)
    assert grad.isfinite().all()


def test_before_the_first_update_ratio_is_one_and_kl_zero():
    batch, (logprobs, *_) = make_micro_batch(), make_logprobs()
    logprobs.requires_grad_()
    loss, sums = grpo_loss(logprobs, None, batch, Algorithm(kl_coef=0.3), old_logprobs=None, ref_logprobs=logprobs.detach())
    loss.backward()
    metrics = step_metrics([{name: value.item() for name, value in sums.items()}])
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == metrics["actor/kl_loss"] == 0
    expected = torch.where(batch.mask, -batch.weights * batch.advantages, 0.0)
    assert loss.item() == pytest.approx(expected.sum().item())
    torch.testing.assert_close(logprobs.grad, expected)


def test_no_kept_token_gives_loss_zero():
    batch, (logprobs, *_) = make_micro_batch(), make_logprobs()
    batch.mask[:] = False
    logprobs.requires_grad_()
    loss, sums = grpo_loss(logprobs, logprobs.detach(), batch, Algorithm(), old_logprobs=None, ref_logprobs=logprobs.detach())
    loss.backward()
    assert loss.item() == 0
    assert not logprobs.grad.any()
    assert set(step_metrics([{name: value.item() for name, value in sums.items()}]).values()) == {0.0}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4]),
        ("token-sum", [1, 1]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20]),
    ],
)
def test_token_weights(aggregation, expected):
    weights = token_weights(np.array([1, 3]), aggregation=aggregation, max_response_length=10)
    np.testing.assert_allclose(weights, expected)
    # each mode written out over a [sequences, positions] matrix of token losses
    losses, mask = np.array([[2.0, 0, 0], [1, 5, 7]]), np.array([[1, 0, 0], [1, 1, 1]])
    per_sequence = (losses * mask).sum(1)
    written_out = {
        "token-mean": per_sequence.sum() / mask.sum(),
        "token-sum": per_sequence.sum(),
        "seq-mean-token-mean": (per_sequence / mask.sum(1)).mean(),
        "seq-mean-token-sum": per_sequence.mean(),
        "seq-mean-token-sum-norm": per_sequence.mean() / 10,
    }
    assert (weights[:, None] * losses * mask).sum() == pytest.approx(written_out[aggregation])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_weights_of_the_means_sum_to_one(aggregation):
    num_tokens = np.array([1, 500, 3, 77])
    assert (token_weights(num_tokens, aggregation=aggregation, max_response_length=512) * num_tokens).sum() == pytest.approx(1)


def test_a_sequence_without_kept_tokens_counts_as_a_sequence():
    weights = token_weights(np.array([0, 2]), aggregation="seq-mean-token-mean", max_response_length=8)
    assert np.isfinite(weights).all()
    assert weights[1] == 1 / 4


def test_mismatch_is_measured_on_known_tokens_only():
    batch = make_micro_batch()
    batch.mask[:4] = True
    batch.rollout_logprobs[:] = math.nan
    batch.rollout_logprobs[:2] = torch.tensor([-1.0, -2.0])
    logprobs = torch.full((T,), -1.5, dtype=torch.float64)
    _, sums = grpo_loss(logprobs, None, batch, Algorithm(), old_logprobs=None, ref_logprobs=None)
    metrics = step_metrics([{name: value.item() for name, value in sums.items()}])
    assert metrics["mismatch/logprob_diff_mean"] == metrics["mismatch/logprob_diff_max"] == 0.5
    prob = math.exp(-1.5)
    assert metrics["mismatch/prob_diff_mean"] == pytest.approx((math.exp(-1) - prob + prob - math.exp(-2)) / 2)
    assert metrics["mismatch/prob_diff_max"] == pytest.approx(math.exp(-1) - prob)
    assert metrics["mismatch/kl"] == pytest.approx((0.1065307 + 0.1487213) / 2, abs=1e-7)


def test_metrics_do_not_depend_on_the_split_into_micro_batches():
    batch, (logprobs, old, ref) = make_micro_batch(), make_logprobs()
    entropy = -logprobs

    def sums(mask):
        part = MicroBatch(**{name: getattr(batch, name) for name in MicroBatch.__slots__} | {"mask": batch.mask & mask})
        _, sums = grpo_loss(logprobs, entropy, part, Algorithm(), old_logprobs=old, ref_logprobs=ref)
        return {name: value.item() for name, value in sums.items()}

    halves = torch.arange(T) < 5
    whole = step_metrics([sums(torch.ones(T, dtype=torch.bool))])
    assert whole == pytest.approx(step_metrics([sums(halves), sums(~halves)]))
    assert whole["actor/pg_clipfrac"] > 0
