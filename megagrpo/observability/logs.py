"""Whose output goes where: everything a rank's libraries print -> <run>/logs/attempt_<n>/rank_<r>.log; the console stays ours.

Works on file descriptors, so that C++ code and child processes are caught too. What is shown on the console is console.py's.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import shutil
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megagrpo.observability.jsonl import LogWriteError, writing

_PACKAGE = Path(__file__).resolve().parent.parent


class RankLogs:
    """Takes over this process's stdout and stderr, for good. Make it before anything that prints is imported.

    Until open() says where the log is, output is kept in an unnamed temporary file. `stdout` and `stderr` are private streams to
    where the two went before: the terminal, or torchrun's pipe.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self.path: Path | None = None
        sys.stdout.reconfigure(line_buffering=True)  # into a file it would wait for kilobytes
        sys.stdout.flush()
        self.stdout, self.stderr = _private_copy(1), _private_copy(2)
        self._early = tempfile.TemporaryFile()  # noqa: SIM115
        _redirect_to(self._early.fileno())
        faulthandler.enable(self.stderr)  # a crash in C++ shows its Python stack on the console
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        warnings.showwarning = _log_warning

    def open(self, attempt_dir: Path) -> None:
        """Write to attempt_dir/rank_<rank>.log from now on, beginning with what was printed so far. Raises LogWriteError."""
        self.path = attempt_dir / f"rank_{self._rank}.log"
        with writing(self.path), open(self.path, "ab", buffering=0) as log:
            _redirect_to(log.fileno())
            self._early.seek(0)
            shutil.copyfileobj(self._early, log)
        self._early.close()

    def report_failure(self, error: BaseException, *, phase: str | None, lost: Sequence[str] = ()) -> None:
        """Tell on the console why this rank ends: which ranks died, or a message for a user's mistake or a full disk, or the traceback.

        Only the first rank to fail tells (it leaves failure.txt beside the logs): the others lose their connection to it and
        their tracebacks, which would bury the cause, go to their log files alone.
        """
        headline = f"rank {self._rank} on {socket.gethostname()} failed" + (f" in {phase}" if phase else "")
        details = "".join(traceback.format_exception(error))
        logs = f"logs of all ranks: {self.path.parent}" if self.path else "no log file yet"
        if lost:  # the connection to them broke, and that is all this rank's own error says
            message = "\n".join(["error: a rank was lost", *lost, logs])
        elif isinstance(error, KeyboardInterrupt):
            message = "stopped by Ctrl-C" + (f" in {phase}" if phase else "")
        else:
            message = f"error: {error}\n({headline}; {logs})" if _explains_itself(error) else f"{details}{headline}; {logs}"
        if not isinstance(error, SystemExit):  # another rank tells
            self.report_first(message)
        with contextlib.suppress(OSError):  # the log's disk may be what is full
            sys.stderr.write(f"{headline}:\n{details}")

    def report_first(self, message: str) -> None:
        """Show why the run ends, unless another rank has done so."""
        if self._is_first_failure(message):
            self.stderr.write(message + "\n")
            self.stderr.flush()

    def _is_first_failure(self, message: str) -> bool:
        if self.path is None:
            return True
        try:
            with open(self.path.with_name("failure.txt"), "x", encoding="utf-8") as file:
                file.write(message + "\n")
        except FileExistsError:
            return False
        except OSError:  # a full disk: better told by every rank than by none
            return True
        return True


def new_attempt(run_dir: Path) -> Path:
    """Make logs/attempt_<n> for this start of the run, and logs/latest point to it. Rank 0 only. Raises LogWriteError."""
    logs = run_dir / "logs"
    with writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.removeprefix("attempt_")) for path in logs.glob("attempt_*")), default=0)
        attempt = logs / f"attempt_{number}"
        attempt.mkdir()
        link = logs / "latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(attempt.name)
        link.replace(logs / "latest")  # replaced in one go: `tail -F logs/latest/...` never finds nothing
    return attempt


def _private_copy(descriptor: int) -> TextIO:
    # Not inherited by children: an orphan must not keep the terminal or a pipe open.
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def _redirect_to(descriptor: int) -> None:
    for standard in (1, 2):
        os.dup2(descriptor, standard)


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: object = None
) -> None:
    """Our own warnings go to the `megagrpo` logger, which the console shows; those of libraries to the log file only."""
    if Path(filename).is_relative_to(_PACKAGE):
        logging.getLogger("megagrpo").warning("%s", message)
    else:
        logging.getLogger("py.warnings").warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)


def _explains_itself(error: BaseException) -> bool:
    """Whether the message says it all: a full disk, or a user's mistake that this package itself found."""
    if isinstance(error, LogWriteError) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, ValueError) and bool(raised_in) and Path(raised_in[0].filename).is_relative_to(_PACKAGE)
