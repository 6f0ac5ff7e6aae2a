"""What the user sees on rank 0: start panel, a live line of what is going on, a line a step, samples, summary.

Metrics and facts -> text. Colours and a live line on a terminal, plain lines elsewhere; ASCII but for the model's own text.
Honours NO_COLOR (rich does).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megagrpo.observability.report import RunSummary
from megagrpo.observability.rollout_log import RolloutRow
from megagrpo.observability.run_facts import short_number

_STEP_FIELDS = (  # metric, its words; those a step does not have are left out
    ("timing_s/step", "{:5.1f}s"),
    ("reward/mean", "reward {:.3f}"),
    ("response_length/mean", "len {:.0f}"),
    ("actor/pg_loss", "loss {:+.4f}"),
    ("actor/kl_loss", "kl {:.4f}"),
    ("actor/entropy", "ent {:.2f}"),
    ("actor/pg_clipfrac", "clip {:.1%}"),
    ("actor/grad_norm", "grad {:.2f}"),
    ("mismatch/prob_diff_mean", "mismatch {:.4f}"),
)
# Above it a value is shown in red. verl's FAQ: a mean difference below 0.005 is normal, above 0.01 the engine's precision is off.
_SUSPECT = {"mismatch/prob_diff_mean": 0.01}
_PHASES = {
    "gen": "generating",
    "reward": "scoring",
    "adv": "estimating advantages",
    "old_log_prob": "computing log-probabilities",
    "ref": "computing reference log-probabilities",
    "update_actor": "training",
    "update_weights": "syncing weights",
    "testing": "evaluating",
    "save_checkpoint": "saving a checkpoint",
    "offload": "offloading",
    "wake": "waking the engine",
    "logging": "logging",
}
_LONGEST_TEXT = 300  # characters of a prompt or response in a sample table


class RunConsole:
    """Writes to `stream` (RankLogs.stdout); with quiet=True, as on every rank but 0, all methods do nothing.

    Warnings that the package logs are shown too.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._console = Console(file=stream, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._plain = not self._console.is_terminal or self._console.is_dumb_terminal
        self._last_print = time.monotonic()
        self._last_reward: float | None = None
        if not quiet:
            logging.getLogger("megagrpo").addHandler(_WarningHandler(self))

    def say(self, text: str | Text) -> None:
        """One line, however long."""
        self._last_print = time.monotonic()
        self._console.print(text, soft_wrap=True)

    @contextmanager
    def watch(self, describe: Callable[[], str], *, every_s: float) -> Iterator[None]:
        """Show what describe() says is going on, and for how long it has: live on a terminal, elsewhere as a line whenever
        nothing else was printed for every_s seconds. describe is called at once, and then from another thread.
        """
        activity = _Activity(describe)
        if self._console.quiet:
            yield
        elif self._plain:
            with _repeating(lambda: self._beat(activity, every_s), period_s=min(1.0, every_s / 2)):
                yield
        else:
            # Its redirections would replace sys.stdout and sys.stderr, which belong to the log file.
            live = Live(get_renderable=activity.render, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
            with live:
                yield

    def start_panel(self, facts: Mapping[str, str]) -> None:
        """What runs where, by run_facts.run_facts."""
        self._panel("megagrpo", facts)

    def step_line(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """The step in one line; the number in brackets is the reward's change since the line before."""
        line = Text().append(f"step {step:{len(str(total))}}/{total}", style="bold")
        for name, words in _STEP_FIELDS:
            if name not in metrics:
                continue
            line.append(" | ", style="dim")
            line.append(words.format(metrics[name]), style="red" if metrics[name] > _SUSPECT.get(name, float("inf")) else None)
            if name == "reward/mean" and self._last_reward is not None:
                change = metrics[name] - self._last_reward
                line.append(f" ({change:+.3f})", style="green" if change > 0 else "dim")
        if "perf/throughput" in metrics:
            line.append(f" | {short_number(metrics['perf/throughput'])} tok/s/device", style="dim")
        if "perf/max_memory_allocated_gb" in metrics:
            line.append(f" | {metrics['perf/max_memory_allocated_gb']:.0f} GiB", style="dim")
        self._last_reward = metrics.get("reward/mean", self._last_reward)
        self.say(line)

    def evaluation_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out accuracies (`val-core/<dataset>/acc/mean@k`, `pass@k`) among the metrics."""
        scores = [f"{name.removeprefix('val-core/')} {value:.3f}" for name, value in metrics.items() if name.startswith("val-core/")]
        self.say(Text(f"evaluation after step {step} | {' | '.join(scores)}", style="bold cyan"))

    def sample_table(self, rows: Sequence[RolloutRow]) -> None:
        """Some samples of a step: what was asked, what was answered, how it scored."""
        if self._plain:
            for row in rows:
                self.say(f"sample | {_scores(row)} | {_one_line(row.prompt)} -> {_one_line(row.response)}")
            return
        table = Table(box=box.ASCII, expand=True)
        for heading, share in (("prompt", 3), ("response", 5), ("scores", 2)):
            table.add_column(heading, ratio=share, overflow="fold")
        for row in rows:
            table.add_row(_one_line(row.prompt), _one_line(row.response), _scores(row))
        self._console.print(table)

    def summary(self, summary: RunSummary, *, run_dir: Path, curve: Path, next_steps: Sequence[str]) -> None:
        """What came of the run, where it is, and what to try next."""
        facts = {
            "steps": f"{summary.num_steps} in {summary.seconds:.0f} s",
            "reward": f"{summary.first_reward:.3f} in the first step, {summary.last_reward:.3f} in the last",
            **{name: f"{before:.3f} before, {after:.3f} after" for name, (before, after) in summary.accuracies.items()},
            "time": ", ".join(f"{name} {share:.0%}" for name, share in summary.time_split.items() if share >= 0.005),
            "curve": str(curve),
            "run": str(run_dir),
        }
        self._panel("done", facts)
        for number, text in enumerate(next_steps):
            self.say(f"{'' if number else 'next: ':6}{text}")

    def _panel(self, title: str, facts: Mapping[str, str]) -> None:
        if self._plain:
            width = max(map(len, facts))
            for text in (title, *(f"  {name:{width}}  {value}" for name, value in facts.items())):
                self.say(text)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in facts.items():
            grid.add_row(name, value)
        self._console.print(Panel(grid, title=title, box=box.ASCII, expand=False))

    def _beat(self, activity: _Activity, every_s: float) -> None:
        text = activity.text()
        if time.monotonic() - self._last_print >= every_s:
            self.say(text)


def phase_words(phase: str | None) -> str:
    """A phase of StepTimer as the user reads it; names that are no phase of a step are words already."""
    return "working" if phase is None else _PHASES.get(phase, phase)


class _Activity:
    """What is going on, and since when it has been the same."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._words, self._since = "", 0.0

    def text(self) -> str:
        words, now = self._describe(), time.monotonic()
        if words != self._words:
            self._words, self._since = words, now
        return f"{words} ({now - self._since:.0f} s)"

    def render(self) -> Text:
        return Text(self.text(), style="dim", no_wrap=True, overflow="crop")


class _WarningHandler(logging.Handler):
    def __init__(self, console: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(Text(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow"))


@contextmanager
def _repeating(action: Callable[[], None], *, period_s: float) -> Iterator[None]:
    """Calls the action from a thread, every period_s seconds."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(period_s):
            action()

    thread = threading.Thread(target=repeat, name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _scores(row: RolloutRow) -> str:
    numbers = {"reward": row.reward, **row.reward_parts, "advantage": row.advantage}
    return ", ".join(f"{name} {'none' if value is None else format(value, '.2f')}" for name, value in numbers.items())


def _one_line(text: str) -> str:
    r"""The text with line ends and control characters as \n, \x1b, ..., cut where it is long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}..."
