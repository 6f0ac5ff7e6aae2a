"""Stage 3: how one mathematical answer is judged, and the process that does it under a time limit.

(reference answer, response) -> Outcome, by math-verify. Imports no torch: every worker process starts with this module.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from math_verify import parse, verify
from sympy import Add, Basic, Mul, Number
from sympy.core.relational import Relational

from megagrpo.rewards.calls import Outcome

READY = "ready"
_BRACES = re.compile(r"\\boxed\s*\{|(?<!\\)[{}]")  # escaped braces are text, as in \left\{


class _TimeUp(BaseException):
    """Not an Exception: math-verify and sympy catch those and would go on."""


def serve(connection: Connection, *, timeout_s: float, parent_pid: int) -> None:
    """Main of a worker process: judges the (reference, response) pairs that arrive until the other end closes."""
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the trainer decides when workers end
    signal.signal(signal.SIGALRM, _raise_time_up)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts, which are whole seconds, are off
    connection.send(READY)
    while True:
        try:
            reference, response = connection.recv()
        except EOFError:
            return
        connection.send(_judge_in_time(reference, response, timeout_s=timeout_s))


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends: a worker deep in sympy would never see the pipe close."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call above
        sys.exit(1)


def _raise_time_up(_signal: int, _frame: FrameType | None) -> None:
    raise _TimeUp


def _judge_in_time(reference: str, response: str, *, timeout_s: float) -> Outcome:
    # Two levels, because the alarm can still ring after the inner block is done.
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return judge(reference, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        return Outcome(timed_out=True)


def judge(reference: str, response: str) -> Outcome:
    """1 when the response's final answer equals the reference (a final_answer), else 0. Takes unbounded time."""
    expected = _parse_reference(reference)
    if not expected:
        return Outcome(failure=f"the reference answer {reference!r} is no mathematical expression")
    is_boxed = last_boxed(response) is not None
    given = _parse(_box(final_answer(response)) if is_boxed else final_answer(response))
    if any(isinstance(value, Number) for value in expected):
        given = [value for value in given if not _is_undone_arithmetic(value)]
    return Outcome(score=float(verify(expected, given, timeout_seconds=None)))


def final_answer(text: str) -> str:
    """Where the final answer stands: in the last \\boxed (MATH), else after the last `####` (GSM8K), else anywhere in the text."""
    boxed = last_boxed(text)
    return (text.rpartition("####")[2] if boxed is None else boxed).strip()


def last_boxed(text: str) -> str | None:
    """What stands between the braces of the last complete \\boxed{...}, the innermost if nested; None without one."""
    open_braces: list[re.Match[str]] = []
    start = end = -1
    for mark in _BRACES.finditer(text):
        if mark[0].endswith("{"):
            open_braces.append(mark)
        elif open_braces:
            opening = open_braces.pop()
            if len(opening[0]) > 1 and opening.end() > start:
                start, end = opening.end(), mark.start()
    return None if start < 0 else text[start:end]


def _box(text: str) -> str:
    return rf"\boxed{{{text}}}"


def _parse_reference(reference: str) -> list[Any]:
    has_delimiters = any(mark in reference for mark in ("$", r"\(", r"\["))
    # math-verify reads LaTeX only where it is marked as such. A dollar sign alone may also be a price.
    return (_parse(reference) if has_delimiters else []) or _parse(_box(reference))


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)


def _is_undone_arithmetic(value: object) -> bool:
    """Whether a sum or product of plain numbers is left to do: math-verify does it, so `17+25` would answer `17+25=`.

    Signs, fractions, percentages and powers of ten are ways of writing a number.
    """
    if isinstance(value, Relational):
        value = value.rhs
    if not isinstance(value, Basic) or value.free_symbols:
        return False
    return value.has(Add) or any(sum(isinstance(arg, Number) and arg != -1 for arg in node.args) > 1 for node in value.atoms(Mul))
