"""What the three tools share: one process or torchrun, a progress bar, and mistakes as one message with exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout works without being installed


def parser(description: str, *folders: tuple[str, str]) -> argparse.ArgumentParser:
    """A parser with required folder options, given as (name, meaning)."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, meaning in folders:
        made.add_argument(name, type=Path, required=True, metavar="DIR", help=meaning)
    return made


def positive(text: str) -> float:
    """A number above zero."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def run(work: Callable[[], int]) -> None:
    """Do the work in a process group of one process, or of torchrun's, and exit with its status; 2 for bad input and full disks."""
    warnings.simplefilter("ignore")  # of the libraries, about what a conversion does not use
    import torch.distributed as dist

    from megagrpo.mcore.cpu import prepare_cpu

    prepare_cpu()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        status = work()
    except (ValueError, OSError, dist.checkpoint.CheckpointException) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)  # other ranks may wait in a collective call: torchrun ends them
    dist.destroy_process_group()
    sys.exit(status)


def _message(error: Exception) -> str:
    """Of a failure that torch's checkpoint writer gathered from all ranks, the first one's."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0]) if failures else str(error)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Rank 0's share of the bytes done, on stderr; the function takes (bytes done since its last call, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    quiet = os.environ.get("RANK", "0") != "0"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


def finished(what: str, out: Path, started: float) -> None:
    """Say, on rank 0, what was made and how long it took."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{what}: {out} ({time.monotonic() - started:.1f} s)")
