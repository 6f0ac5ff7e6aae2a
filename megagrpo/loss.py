"""Stage 7: log-probabilities of a pack of tokens -> the GRPO loss and what to report of it. Pure tensor maths on one rank.

Every term is a function of one token; what weighs the tokens against each other (aggregation) is decided once for a whole optimizer step
by token_weights. So the loss is a plain sum, over tokens, micro-batches and ranks alike. T tokens of a pack, N sequences of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.config.schema import Algorithm
from megagrpo.types import MicroBatch

_MAX_LOG_RATIO = 20.0  # e^20: far outside any clip range, far inside fp32
_MAX_LOW_VAR_KL = 10.0


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    micro_batch: MicroBatch,
    algorithm: Algorithm,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, and sums over its tokens from which step_metrics makes the metrics of the optimizer step.

    logprobs, entropy, old_logprobs, ref_logprobs [T] -> loss [], sums of [] (detached). loss = sum of weight x (policy loss + kl_coef x KL)
    over the tokens that are kept. old_logprobs None means strictly on-policy: the current ones, detached, so that every ratio is 1.
    ref_logprobs None leaves the KL term out. Where micro_batch.mask is False nothing that any input holds has an effect.
    """
    mask = micro_batch.mask

    def kept(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)  # not a product: NaN x 0 is NaN, forward and backward

    logprobs = kept(logprobs)
    old_logprobs = logprobs.detach() if old_logprobs is None else kept(old_logprobs)
    weights = kept(micro_batch.weights)

    policy = policy_loss(
        logprobs,
        old_logprobs,
        kept(micro_batch.advantages),
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
    )
    loss = pg_loss = (weights * policy.loss).sum()
    sums = {
        "num_tokens": mask.sum(),
        "pg_loss": pg_loss,
        "clipped_low": policy.clipped_low.sum(),
        "clipped_high": policy.clipped_high.sum(),
        "ppo_kl": (old_logprobs - logprobs).sum(),
        **mismatch_sums(old_logprobs, micro_batch.rollout_logprobs, mask=mask),
    }
    if ref_logprobs is not None:
        kl_loss = (weights * KL_ESTIMATORS[algorithm.kl_estimator](logprobs, kept(ref_logprobs))).sum()
        loss = loss + algorithm.kl_coef * kl_loss
        sums["kl_loss"] = kl_loss
    if entropy is not None:
        sums["entropy"] = kept(entropy).sum()
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in sums.items()}}


class PolicyLoss(NamedTuple):
    """The clipped policy loss of every token and where the clip took the gradient away."""

    loss: Tensor  # [T]
    clipped_low: Tensor  # [T] bool, the ratio of a token with negative advantage is below the range
    clipped_high: Tensor  # [T] bool, the ratio of a token with positive advantage is above the range


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped objective: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprob - old_logprob). All [T].

    arXiv 1707.06347; separate bounds (clip-higher) from DAPO, arXiv 2503.14476. The log-ratio is clamped to +-20 before exp, as in verl.
    Example, clip 0.2 and 0.28: (A, r) = (1, 1.5) -> -1.28; (1, 0.5) -> -0.5; (-1, 1.5) -> 1.5; (-1, 0.5) -> 0.8.
    """
    ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return PolicyLoss(
        loss=loss,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = logprob - ref_logprob: unbiased, of either sign. All [T]. http://joschu.net/blog/kl-approx.html

    As a loss its expected gradient is zero: it is of use in the reward. Example: ref - logprob = 0.5 -> -0.5.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 = (logprob - ref_logprob)^2 / 2: low variance, biased, and the right gradient in expectation. All [T]. Same source as kl_k1.

    Example: ref - logprob = 0.5 -> 0.125.
    """
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = e^d - d - 1 with d = ref_logprob - logprob: unbiased and never negative. All [T]. Same source as kl_k1.

    Example: d = 0.5 -> 0.1487213; d = -0.5 -> 0.1065307.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def kl_low_var(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 with d clamped to +-20 and the result to +-10, as in verl. All [T].

    The first clamp must come before exp: clamping only the result leaves 0 x inf = NaN in the gradient of d = 100.
    Example: d = 0.5 -> 0.1487213; d = 3 -> 10; d = 100 -> 10 with gradient 0.
    """
    difference = (ref_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL)


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|logprob - ref_logprob|, as in verl. All [T]. Example: ref - logprob = 0.5 -> 0.5."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "low_var_kl": kl_low_var,
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
}


def token_weights(num_tokens: np.ndarray, *, aggregation: str, max_response_length: int) -> np.ndarray:
    """The weight in the loss of each kept token of a sequence: float64 [N], for the N sequences of a whole optimizer step.

    num_tokens [N]: kept tokens of every sequence, over all ranks and micro-batches; a sequence without any counts as one of the N.
    Weights times token counts sum to 1 in the modes token-mean and (without such sequences) seq-mean-token-mean, not in the others.
    Example, num_tokens [1, 3]: token-mean [1/4, 1/4]; token-sum [1, 1]; seq-mean-token-mean [1/2, 1/6]; seq-mean-token-sum [1/2, 1/2];
    seq-mean-token-sum-norm with max_response_length 10 [1/20, 1/20] (Dr. GRPO, arXiv 2503.20783).
    """
    num_sequences = len(num_tokens)
    match aggregation:
        case "token-mean":
            return np.full(num_sequences, 1 / max(num_tokens.sum(), 1))
        case "token-sum":
            return np.ones(num_sequences)
        case "seq-mean-token-mean":
            return 1 / (num_sequences * np.maximum(num_tokens, 1))
        case "seq-mean-token-sum":
            return np.full(num_sequences, 1 / num_sequences)
        case "seq-mean-token-sum-norm":
            return np.full(num_sequences, 1 / (num_sequences * max_response_length))
    raise AssertionError(f"unknown loss aggregation {aggregation}")


def mismatch_sums(old_logprobs: Tensor, rollout_logprobs: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
    """How far the trainer's log-probabilities are from the engine's, summed over the kept tokens whose rollout_logprobs are known.

    All [T]; rollout_logprobs is NaN where the engine was not asked. KL is k3 of KL(rollout || trainer), on the tokens it sampled.
    """
    known = mask & ~rollout_logprobs.isnan()
    old = torch.where(known, old_logprobs.detach(), 0.0)
    rollout = torch.where(known, rollout_logprobs, 0.0)
    prob_diff, logprob_diff = (old.exp() - rollout.exp()).abs(), (old - rollout).abs()
    return {
        "num_rollout_tokens": known.sum(),
        "rollout_prob_diff": prob_diff.sum(),
        "rollout_prob_diff_max": prob_diff.max(),
        "rollout_logprob_diff": logprob_diff.sum(),
        "rollout_logprob_diff_max": logprob_diff.max(),
        "rollout_kl": kl_k3(rollout, old).sum(),
    }


def step_metrics(sums: list[dict[str, float]], *, num_updates: int = 1) -> dict[str, float]:
    """The metrics of num_updates optimizer steps, in verl's names, from the sums of all their micro-batches over all data-parallel ranks.

    Losses are averaged over the optimizer steps, everything else over their tokens.
    """
    total = {name: sum(each[name] for each in sums) for name in sums[0]}
    num_tokens, num_rollout_tokens = max(total["num_tokens"], 1), total["num_rollout_tokens"]
    metrics = {
        "actor/loss": total["loss"] / num_updates,
        "actor/pg_loss": total["pg_loss"] / num_updates,
        "actor/pg_clipfrac": (total["clipped_low"] + total["clipped_high"]) / num_tokens,
        "actor/pg_clipfrac_low": total["clipped_low"] / num_tokens,
        "actor/pg_clipfrac_high": total["clipped_high"] / num_tokens,
        "actor/ppo_kl": total["ppo_kl"] / num_tokens,
    }
    if "kl_loss" in total:
        metrics["actor/kl_loss"] = total["kl_loss"] / num_updates
    if "entropy" in total:
        metrics["actor/entropy"] = total["entropy"] / num_tokens
    if num_rollout_tokens:
        metrics["mismatch/prob_diff_mean"] = total["rollout_prob_diff"] / num_rollout_tokens
        metrics["mismatch/prob_diff_max"] = max(each["rollout_prob_diff_max"] for each in sums)
        metrics["mismatch/logprob_diff_mean"] = total["rollout_logprob_diff"] / num_rollout_tokens
        metrics["mismatch/logprob_diff_max"] = max(each["rollout_logprob_diff_max"] for each in sums)
        metrics["mismatch/kl"] = total["rollout_kl"] / num_rollout_tokens
    return metrics
