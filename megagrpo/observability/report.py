"""What came of a run: <run>/metrics.jsonl -> a summary, and its curve as a PNG. Works on a run that is still going.

By hand: python -m megagrpo.observability.report RUN_DIR. Needs nothing of the run but that file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from megagrpo.observability.jsonl import read_jsonl, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ACCURACY_PREFIX = "val-core/"
_SMOOTH_FROM = 20  # steps; shorter curves are drawn as they are


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in numbers.

    Example: RunSummary(num_steps=60, seconds=181.2, first_reward=0.31, last_reward=0.86, accuracies={"demo/acc/mean@1": (0.33, 0.84)},
    time_split={"gen": 0.6, "update_actor": 0.3, "unaccounted": 0.1})
    """

    num_steps: int
    seconds: float  # of the steps together
    first_reward: float  # NaN, as the next, of a run without a step
    last_reward: float
    accuracies: dict[str, tuple[float, float]]  # held-out, by dataset and measure: at the first evaluation and at the last
    time_split: dict[str, float]  # phase -> share of the seconds, largest first


@dataclass(frozen=True, slots=True)
class _Curve:
    steps: list[int]
    values: list[float]


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The metrics by step, in order. Of a step that is there twice (before and after a resume) the later values count."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run_dir} has no metrics.jsonl: name the directory of a run (runs/<name>)")
    steps: dict[int, dict[str, float]] = {}
    for record in read_jsonl(path):
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def summarise(run_dir: Path) -> RunSummary:
    """The first and last values and the time split. Raises ValueError where there is no run."""
    metrics = read_metrics(run_dir)
    rewards = _curve(metrics, "reward/mean").values or [float("nan")]
    curves = {name.removeprefix(_ACCURACY_PREFIX): _curve(metrics, name).values for name in _accuracy_names(metrics)}
    phase_names = {name for step in metrics for name in step if name.startswith("timing_s/")}
    phases = {name: sum(_curve(metrics, name).values) for name in phase_names}
    seconds = phases.pop("timing_s/step", 0.0)
    shares = {name.removeprefix("timing_s/"): value / seconds for name, value in phases.items() if seconds}
    return RunSummary(
        num_steps=len(_curve(metrics, "reward/mean").values),
        seconds=seconds,
        first_reward=rewards[0],
        last_reward=rewards[-1],
        accuracies={name: (values[0], values[-1]) for name, values in curves.items()},
        time_split=dict(sorted(shares.items(), key=lambda item: -item[1])),
    )


def plot_curve(run_dir: Path) -> Path:
    """Draw reward and held-out accuracy, response length, and rollout/trainer mismatch over the steps into <run>/curve.png."""
    # The figure's own canvas is Agg: no display, and no pyplot, whose figures are global.
    from matplotlib.figure import Figure

    metrics = read_metrics(run_dir)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    figure.suptitle(run_dir.resolve().name)
    learning, length, mismatch = figure.subplots(1, 3)

    _draw(learning, _curve(metrics, "reward/mean"), label="reward in training")
    for name in _accuracy_names(metrics):
        curve = _curve(metrics, name)
        learning.plot(curve.steps, curve.values, "s--", markersize=5, label=f"held-out {name.removeprefix(_ACCURACY_PREFIX)}")
    learning.set_title("reward", fontsize=10)

    _draw(length, _curve(metrics, "response_length/mean"), label="mean")
    length.set_title("response length in tokens", fontsize=10)

    for statistic in ("mean", "max"):
        _draw(mismatch, _curve(metrics, f"mismatch/prob_diff_{statistic}"), label=statistic)
    mismatch.set_yscale("symlog", linthresh=1e-7)  # spans decades, and may be 0
    mismatch.set_title("difference of probabilities, rollout and trainer", fontsize=10)

    for axes in (learning, length, mismatch):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path = run_dir / "curve.png"
    with writing(path):
        figure.savefig(path, dpi=120)
    return path


def main(arguments: Sequence[str]) -> int:
    """Draw the curve of the run directory named and say where it is; status 2 and one line for a mistake."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m megagrpo.observability.report RUN_DIR\n")
        return 2
    try:
        path = plot_curve(Path(arguments[0]))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


def _curve(metrics: list[dict[str, float]], name: str) -> _Curve:
    there = [step for step in metrics if name in step]
    return _Curve([int(step["step"]) for step in there], [step[name] for step in there])


def _accuracy_names(metrics: list[dict[str, float]]) -> list[str]:
    return sorted({name for step in metrics for name in step if name.startswith(_ACCURACY_PREFIX)})


def _draw(axes: Axes, curve: _Curve, *, label: str) -> None:
    """The values; where they are many, faint under their running mean."""
    if len(curve.values) < _SMOOTH_FROM:
        axes.plot(curve.steps, curve.values, ".-", label=label)
        return
    reach = len(curve.values) // 20  # to both sides: a mean of the past alone would lag behind
    means = [fmean(curve.values[max(0, i - reach) : i + reach + 1]) for i in range(len(curve.values))]
    (line,) = axes.plot(curve.steps, means, label=label)
    axes.plot(curve.steps, curve.values, alpha=0.3, color=line.get_color(), linewidth=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
