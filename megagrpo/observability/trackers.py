"""Where the metrics of a step go: <run>/metrics.jsonl always, TensorBoard by default, W&B on request.

Plain numbers -> files. Rank 0 only; computes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.schema import Config
from megagrpo.observability.jsonl import JsonlFile, writing

_log = logging.getLogger(__name__)


class Trackers:
    """Everything that logging.trackers names, behind one log(); files are opened now, so that what is missing is missed early.

    Raises ValueError where wandb is asked for and not installed, LogWriteError where a file cannot be written.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._trackers: list[Any] = [_Jsonl(run_dir)]
        if "tensorboard" in config.logging.trackers:
            self._trackers.append(_TensorBoard(run_dir))
        if "wandb" in config.logging.trackers:
            self._trackers.append(_Wandb(run_dir, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, on disk when it returns. Non-finite values are left out with a warning: JSON and plots have none."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if dropped := [f"{name}={metrics[name]}" for name in metrics if name not in finite]:
            _log.warning("step %d: left out of the metrics as not finite: %s", step, ", ".join(dropped))
        for tracker in self._trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        """Finish what trackers do in the background."""
        for tracker in self._trackers:
            tracker.close()


class _Jsonl:
    def __init__(self, run_dir: Path) -> None:
        self._file = JsonlFile(run_dir / "metrics.jsonl")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.append({"step": step, **metrics})

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = run_dir / "tb"
        with writing(self._path):
            self._writer = SummaryWriter(str(self._path))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with writing(self._path):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # it writes from a thread, whose failure shows here

    def close(self) -> None:
        with writing(self._path):
            self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "logging.trackers names wandb, which is not installed; pip install 'megagrpo[wandb]', or take it out of the list"
            ) from error
        self._run = wandb.init(
            project=config.logging.wandb_project, name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json")
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
