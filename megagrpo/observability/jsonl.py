"""Files of one JSON object a line, written so that a killed run or a full disk leaves whole lines and one clear message.

Records -> lines. What the records mean is for trackers.py and rollout_log.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LogWriteError(OSError):
    """A file of the run that cannot be written, as when the disk is full. The message is meant for the user."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a LogWriteError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise LogWriteError(
            f"cannot write {path}: {error.strerror or error}; make room there, or set trainer.runs_dir to a folder that can be written"
        ) from error


class JsonlFile:
    """A file that grows by one line a record; each is on disk (or has raised LogWriteError) when append returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115  unbuffered: a failed write leaves nothing to fail again at close
            if self._file.seek(0, os.SEEK_END):
                self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a killed run may have left half a line

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; floats must be finite."""
        with writing(self._path):
            _write(self._file, record)

    def close(self) -> None:
        """Nothing may be appended after it."""
        self._file.close()


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a whole file anew; raises LogWriteError."""
    with writing(path), open(path, "wb", buffering=0) as file:
        for record in records:
            _write(file, record)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, also of one that is being written: a last line without its end is not yet there."""
    whole_lines, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole_lines.splitlines()]


def _write(file: Any, record: dict[str, Any]) -> None:
    # A lone surrogate, which UTF-8 cannot hold, becomes \udxxx: JSON's own escape for it.
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", errors="backslashreplace")
    while line:  # a raw write may be short; on a full disk the next one raises
        line = line[file.write(line) :]
