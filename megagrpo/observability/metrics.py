"""What a step reports of its samples and its speed.

Names are verl's where verl has one. The metrics of the loss and the mismatch are loss.step_metrics'; nothing is written here.
"""

from __future__ import annotations

import numpy as np

from megagrpo.types import Sample


def sample_metrics(samples: list[Sample], advantages: np.ndarray) -> dict[str, float]:
    """Rewards, advantages and lengths of all samples of a step; advantages [num_samples] in their order.

    reward/std is the mean over groups of the group's standard deviation (ddof 1, what GRPO divides by; TRL's reward_std),
    reward/frac_zero_std the share of groups whose rewards are all equal and teach nothing; response_length/clip_ratio the share
    of truncated responses.
    """
    rewards = np.array([s.reward for s in samples])
    groups = np.array([s.group for s in samples])
    by_group = [rewards[groups == group] for group in np.unique(groups)]
    response_lengths = np.array([len(s.response_ids) for s in samples])
    metrics = {
        **_spread("reward", rewards),
        "reward/std": float(np.mean([r.std(ddof=1) if len(r) > 1 else 0.0 for r in by_group])),
        "reward/frac_zero_std": float(np.mean([np.ptp(r) == 0 for r in by_group])),
        "critic/rewards/mean": float(rewards.mean()),  # verl's name, for dashboards that have it
        **_spread("advantage", advantages),
        **_spread("critic/advantages", advantages),
        **_spread("response_length", response_lengths),
        "response_length/clip_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        **_spread("prompt_length", np.array([len(s.prompt_ids) for s in samples])),
    }
    for name in samples[0].reward_parts:
        metrics[f"reward/{name}/mean"] = float(np.mean([s.reward_parts[name] for s in samples]))
    return metrics


def speed_metrics(*, step_seconds: float, num_tokens: int, num_devices: int) -> dict[str, float]:
    """num_tokens: prompts and responses of the step over all ranks. perf/throughput is tokens per second and device."""
    return {
        "perf/time_per_step": step_seconds,
        "perf/total_num_tokens": float(num_tokens),
        "perf/throughput": num_tokens / (step_seconds * num_devices),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}
