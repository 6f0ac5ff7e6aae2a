"""Which phase every rank is in, on disk, so that when a rank dies without a word the others can say where.

A rank keeps one short line in <attempt>/phases/rank_<r>. Ranks of other nodes are read but not probed: their process ids mean nothing here.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_WIDTH = 160  # of the line: rewritten in place, it never shrinks


class PhaseBoard:
    """This rank's line, and everyone's."""

    def __init__(self, attempt_dir: Path, *, rank: int) -> None:
        self._dir = attempt_dir / "phases"
        self._dir.mkdir(exist_ok=True)
        self._file = os.open(self._dir / f"rank_{rank}", os.O_WRONLY | os.O_CREAT)
        self._rank = rank
        self.enter("setting up", step=0)

    def enter(self, phase: str, *, step: int) -> None:
        """Say what this rank does from now on."""
        self.current = f"step {step}, {phase}"
        line = f"{os.getpid()} {socket.gethostname()} {self.current}"
        os.pwrite(self._file, f"{line[:_WIDTH]:{_WIDTH}}\n".encode(), 0)

    def lost(self, *, patience_s: float = 0.0) -> list[str]:
        """A sentence for every rank of this node whose process is gone; looks again for patience_s while there is none.

        Connections of a killed process break a moment before it counts as dead.
        """
        deadline = time.monotonic() + patience_s
        while not (found := self._dead()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _dead(self) -> list[str]:
        sentences = []
        for path in sorted(self._dir.glob("rank_*"), key=lambda p: int(p.name.removeprefix("rank_"))):
            pid, host, *words = path.read_text().split() or ("0", "")  # made, but not yet written
            if host == socket.gethostname() and not _is_alive(int(pid)):
                sentences.append(f"{path.name.replace('_', ' ')} (process {pid} on {host}) died in {' '.join(words)}")
        return sentences


def end_on_sigterm(report: Callable[[], None]) -> None:
    """Call report() and end this process when SIGTERM comes, even while the main thread waits inside a collective.

    Python runs signal handlers only between bytecodes of the main thread, which a hung collective never reaches; the wakeup file
    descriptor is written at once, and a thread waits for it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait() -> None:
        while received := os.read(read_end, 1):
            if received[0] == signal.SIGTERM:
                report()
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
