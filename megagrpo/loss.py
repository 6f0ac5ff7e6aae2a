"""Stage 7: log-probabilities -> the GRPO loss. Pure tensor maths on one micro-batch; no process groups, no model.

The loss of an optimizer step is the sum over all kept tokens of all ranks of weight x token loss; token_weights says what the weights
are, grpo_loss what a token's loss is. T: packed tokens of a micro-batch, B: responses of an optimizer step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megagrpo.config.schema import Algorithm
from megagrpo.types import MicroBatch

_MAX_LOG_RATIO = 20.0  # exp of more overflows what follows; verl clamps at the same
_MAX_LOW_VAR_KL = 10.0


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    micro_batch: MicroBatch,
    algorithm: Algorithm,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight x (policy loss + kl_coef x KL) over the kept tokens, what to report of them).

    logprobs [T] with gradient, entropy [T], old_logprobs [T] or None when the current policy is the one that sampled (the ratio is
    then exactly 1), ref_logprobs [T] or None without a KL term. Where micro_batch.mask is False nothing is read: NaN or infinity
    there changes neither loss nor gradient. Reported, detached: weighted sums `pg_loss`, `kl_loss`; sums over kept tokens
    `entropy_sum`, `ppo_kl_sum`, `clipped_low_sum`, `clipped_high_sum`, `ratio_sum`; `ratio_max`; and `num_tokens`. `logprobs` is [T].
    """
    mask = micro_batch.mask
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    zeros = torch.zeros_like(logprobs)
    logprobs_kept = torch.where(mask, logprobs, zeros)
    old = torch.where(mask, old, zeros)
    weights = torch.where(mask, micro_batch.weights, zeros)
    advantages = torch.where(mask, micro_batch.advantages, zeros)

    policy, ratio = policy_loss(logprobs_kept, old, advantages, clip_low=algorithm.clip_ratio_low, clip_high=algorithm.clip_ratio_high)
    pg_loss = (weights * policy).sum()
    loss, kl_loss = pg_loss, pg_loss.new_zeros(())
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs_kept, torch.where(mask, ref_logprobs, zeros), algorithm.kl_estimator)
        kl_loss = (weights * kl).sum()
        loss = loss + algorithm.kl_coef * kl_loss

    ratio = ratio.detach()
    low, high = clipped(ratio, advantages, clip_low=algorithm.clip_ratio_low, clip_high=algorithm.clip_ratio_high)
    return loss, {
        "pg_loss": pg_loss.detach(),
        "kl_loss": kl_loss.detach(),
        "entropy_sum": torch.where(mask, entropy.detach(), zeros).sum(),
        "ppo_kl_sum": (old - logprobs_kept.detach()).sum(),
        "clipped_low_sum": (low & mask).sum(),
        "clipped_high_sum": (high & mask).sum(),
        "ratio_sum": torch.where(mask, ratio, zeros).sum(),
        "ratio_max": torch.where(mask, ratio, zeros).max(),
        "num_tokens": mask.sum(),
        "logprobs": logprobs.detach(),
    }


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(loss, ratio), both [T]: max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logprobs - old_logprobs).

    PPO's clipped surrogate (arXiv:1707.06347), with a higher upper bound where clip_high > clip_low (DAPO, arXiv:2503.14476).
    Example, bounds 0.2 and 0.28: A = 1, r = 1.5 -> -1.28; A = -1, r = 1.5 -> 1.5; A = -1, r = 0.5 -> 0.8.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)), ratio


def clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Whether the lower and the upper bound took the gradient of a token away, both [T] bool."""
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(policy || reference) per sampled token, [T] and [T] -> [T].

    With d = ref - policy (Schulman, http://joschu.net/blog/kl-approx.html): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, abs = |d|.
    low_var_kl is k3 with d clamped to [-20, 20] before the exp (after it would be too late: the backward of an overflow is NaN) and
    the result to [-10, 10]. Example: d = 0.5 -> k3 0.1487213; d = 25 -> low_var_kl 10, gradient 0.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "abs":
        return d.abs()
    if estimator == "low_var_kl":
        d = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return (torch.exp(d) - d - 1).clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL)
    assert estimator == "k3", f"unknown KL estimator {estimator}"
    return torch.exp(d) - d - 1


def token_weights(response_lengths: np.ndarray, aggregation: str, *, max_response_length: int) -> np.ndarray:
    """The weight of every token of each response in the loss of an optimizer step, [B] -> [B] float64.

    response_lengths: of all responses of the step, over all ranks, each at least 1. token-mean: 1 / all tokens, the weights sum to 1.
    token-sum: 1. seq-mean-token-sum: 1 / B. seq-mean-token-mean: 1 / (B x length), sum 1. seq-mean-token-sum-norm:
    1 / (B x max_response_length) (Dr. GRPO, arXiv:2503.20783). The mean forms make the loss independent of how it is split.
    """
    lengths = response_lengths.astype(np.float64)
    ones, num_responses = np.ones_like(lengths), len(lengths)
    if aggregation == "token-mean":
        return ones / lengths.sum()
    if aggregation == "token-sum":
        return ones
    if aggregation == "seq-mean-token-sum":
        return ones / num_responses
    if aggregation == "seq-mean-token-mean":
        return ones / (num_responses * lengths)
    assert aggregation == "seq-mean-token-sum-norm", f"unknown loss aggregation {aggregation}"
    return ones / (num_responses * max_response_length)
