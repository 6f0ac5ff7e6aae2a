"""Stage 3: the `format` reward: 1 when the whole response matches reward.format_pattern, else 0. Says nothing about the answer."""

from __future__ import annotations

import re

from megagrpo.rewards.functions import RewardFunction


def format_reward(pattern: str) -> RewardFunction:
    """The reward function of a pattern. Raises ValueError when it is no regular expression."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"reward.format_pattern={pattern!r} is no regular expression: {error}") from error

    def matches(response: str) -> float:
        return float(compiled.fullmatch(response) is not None)

    return matches
