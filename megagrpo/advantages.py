"""Stage 4: rewards of the samples of a step -> one advantage per sample, relative to the other samples of its group.

Plain float64 numpy. Every token of a response gets the advantage of its sample; batching.py spreads it.
"""

from __future__ import annotations

import numpy as np

from megagrpo.config.schema import Algorithm
from megagrpo.types import Sample


def estimate_advantages(samples: list[Sample], algorithm: Algorithm) -> np.ndarray:
    """The advantage of every sample by algorithm.advantage_estimator: float64 [num_samples], in the order of the samples."""
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    assert np.isfinite(rewards).all(), "every sample needs a finite reward before advantages are estimated"
    groups = np.array([sample.group for sample in samples])
    advantages = np.empty_like(rewards)
    for group in np.unique(groups):
        members = groups == group
        advantages[members] = _of_group(rewards[members], algorithm)
    return advantages


def _of_group(rewards: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    match algorithm.advantage_estimator:
        case "grpo":
            return group_normalised(rewards, epsilon=algorithm.advantage_epsilon)
        case "dr_grpo":
            return mean_centred(rewards)
        case "rloo":
            return leave_one_out(rewards)


def group_normalised(rewards: np.ndarray, *, epsilon: float) -> np.ndarray:
    """GRPO: (r - mean) / (std + epsilon), with the sample standard deviation (ddof 1). rewards [G] -> [G].

    DeepSeekMath, arXiv 2402.03300, as verl computes it: a group of one has mean 0 and std 1.
    Example: [1, 0, 0, 1], epsilon 1e-6 -> [0.8660239, -0.8660239, -0.8660239, 0.8660239]; [1] -> [0.999999].
    """
    std = rewards.std(ddof=1) if len(rewards) > 1 else 1.0
    centred = mean_centred(rewards)
    # Equal rewards are centred to exact zeros, which epsilon 0 must not turn into 0 / 0.
    return centred / (std + epsilon) if centred.any() else centred


def mean_centred(rewards: np.ndarray) -> np.ndarray:
    """Dr. GRPO: r - mean, which no longer weighs easy and hard prompts up. rewards [G] -> [G].

    arXiv 2503.20783. A group of one has mean 0. Example: [1, 0, 0, 0] -> [0.75, -0.25, -0.25, -0.25].
    """
    if len(rewards) == 1:
        return rewards.copy()
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)  # the rounded mean of equal numbers may differ from them
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO: r - mean of the others, an unbiased baseline; equal to (r - mean) G / (G - 1). rewards [G] -> [G].

    arXiv 2402.14740. A group of one has no others, whose mean is taken as 0. Example: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3].
    """
    size = len(rewards)
    return mean_centred(rewards) * (size / (size - 1) if size > 1 else 1.0)
