"""What a step reports of its samples and its speed, and how numbers that each rank has alone become one.

Names are verl's where verl has one. The metrics of the loss and the mismatch are loss.step_metrics'; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.types import Sample

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can still be combined: total / count. Example: Mean(6.0, 2) with Mean(0.0, 1) is 2."""

    total: float
    count: float

    def combine(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """NaN of nothing."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over all ranks."""

    value: float

    def combine(self, other: Sum) -> Sum:
        """The sum of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest on any rank; NaN if any is."""

    value: float

    def combine(self, other: Max) -> Max:
        """The larger of both."""
        return Max(float(np.maximum(self.value, other.value)))


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest on any rank; NaN if any is."""

    value: float

    def combine(self, other: Min) -> Min:
        """The smaller of both."""
        return Min(float(np.minimum(self.value, other.value)))


Metric = Mean | Sum | Max | Min


def combine(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several micro-batches or ranks as one; a name may be missing in some."""
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = combined.get(name)
            assert before is None or type(before) is type(metric), f"{name} is {before} here and {metric} there"
            combined[name] = metric if before is None else before.combine(metric)
    return combined


def reduce_metrics(metrics: Mapping[str, Metric], *, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The metrics of all ranks of the group as plain numbers, on every rank; means of nothing are left out. Collective.

    Each rank passes what it alone knows ({} if nothing): ranks that hold copies of one number would count it several times.
    """
    import torch.distributed as dist

    parts: list[dict[str, Metric]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(metrics), group=group)
    return {name: metric.value for name, metric in combine(parts).items() if metric != Mean(0, 0)}


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
