"""Stage 3: what a reward function is asked (Call) and what comes of it (Outcome). Plain data, sent to worker processes too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One response to be scored.

    Example: Call(prompt="2+3=", response="5", columns={"answer": "5"})
    """

    prompt: str
    response: str
    columns: dict[str, Any]  # of the prompt's row, `answer` among them


@dataclass(frozen=True, slots=True)
class Outcome:
    """The score of one call; 0 with a reason when there is none."""

    score: float = 0.0
    failure: str | None = None  # what went wrong: the function's or the dataset's fault, never the response's
    timed_out: bool = False
