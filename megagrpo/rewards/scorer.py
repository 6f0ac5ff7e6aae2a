"""Stage 3: samples and their texts -> samples with rewards, and a tally of what went wrong on the way.

Weighs the reward functions named in reward.functions. Which rank scores which samples, and metrics of the rewards, are the caller's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megagrpo.config.keys import did_you_mean
from megagrpo.config.schema import BUILT_IN_REWARDS
from megagrpo.rewards.calls import Call, Outcome
from megagrpo.rewards.format import format_reward
from megagrpo.rewards.functions import call_each, load_function
from megagrpo.rewards.math_answer import MathGrader
from megagrpo.rewards.reasoning_gym import reasoning_gym_reward

if TYPE_CHECKING:
    from megagrpo.config.schema import Config
    from megagrpo.types import Prompt, Sample

logger = logging.getLogger(__name__)

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Tally:
    """How the calls of the reward functions went, by the function's name; of one rank, or of several added up."""

    num_calls: int  # of each function
    num_failures: Counter[str]  # calls that raised or returned no finite number
    num_timeouts: int  # of math_answer
    examples: tuple[str, ...]  # the first failures, each with its function and prompt

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        """The tally of several ranks, in their order."""
        parts = list(tallies)
        return Tally(
            num_calls=sum(part.num_calls for part in parts),
            num_failures=sum((part.num_failures for part in parts), Counter()),
            num_timeouts=sum(part.num_timeouts for part in parts),
            examples=tuple(example for part in parts for example in part.examples)[:_NUM_EXAMPLES],
        )

    def metrics(self) -> dict[str, float]:
        """reward/timeout_rate and reward/failure_rate, as shares of the calls."""
        calls = max(1, self.num_calls)
        return {"reward/timeout_rate": self.num_timeouts / calls, "reward/failure_rate": max(self.num_failures.values(), default=0) / calls}


@dataclass(frozen=True, slots=True)
class Scores:
    """Samples with their rewards, in the order they were given, and how the calls went."""

    samples: list[Sample]
    tally: Tally


class Scorer:
    """The reward functions of a run. Raises ValueError when one cannot be found. close() ends its worker processes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._math_grader: MathGrader | None = None
        self._weights: dict[str, float] = {}
        self._functions: dict[str, Callable[[list[Call]], list[Outcome]]] = {}
        for name, weight in config.reward.functions.items():
            part = name.rpartition(":")[2]
            if part in self._functions:
                raise ValueError(f"reward.functions: two functions are called {part}; rename one, their metrics have that name")
            self._weights[part], self._functions[part] = weight, self._build(name)

    def score(self, samples: list[Sample], *, responses: list[str], prompts: list[Prompt]) -> Scores:
        """Rewards for samples, whose decoded texts are `responses`; `prompts` are the whole step's, which sample.group indexes.

        A call that fails scores 0 and is counted; whether that is too many is for check_failures to say, over all ranks.
        """
        calls = [
            Call(prompt=prompts[sample.group].text, response=response, columns=prompts[sample.group].columns)
            for sample, response in zip(samples, responses, strict=True)
        ]
        outcomes = {name: function(calls) for name, function in self._functions.items()}
        failures = [
            (name, f"{name} on prompt {sample.prompt_id}, sample {sample.id}: {outcome.failure}")
            for name, column in outcomes.items()
            for sample, outcome in zip(samples, column, strict=True)
            if outcome.failure is not None
        ]
        tally = Tally(
            num_calls=len(calls),
            num_failures=Counter(name for name, _ in failures),
            num_timeouts=sum(outcome.timed_out for column in outcomes.values() for outcome in column),
            examples=tuple(text for _, text in failures[:_NUM_EXAMPLES]),
        )
        for example in tally.examples:
            logger.warning("a reward function failed (%d failures in this batch): %s", len(failures), example)
        return Scores([self._scored(sample, row) for sample, row in zip(samples, _transposed(outcomes, len(samples)), strict=True)], tally)

    def close(self) -> None:
        """End the worker processes of math_answer."""
        if self._math_grader:
            self._math_grader.close()

    def _build(self, name: str) -> Callable[[list[Call]], list[Outcome]]:
        reward = self._config.reward
        match name:
            case "math_answer":
                self._math_grader = MathGrader(timeout_s=reward.timeout_s, num_workers=reward.num_workers)
                return self._math_grader.grade
            case "format":
                return call_each(format_reward(reward.format_pattern))
            case "reasoning_gym":
                return call_each(reasoning_gym_reward(self._config.data.reasoning_gym_config))
            case _ if ":" in name:
                return call_each(load_function(name))
            case _:
                hint = did_you_mean(name, candidates=BUILT_IN_REWARDS)
                raise ValueError(f"reward.functions: {name} is neither one of {', '.join(BUILT_IN_REWARDS)} nor module:function{hint}")

    def _scored(self, sample: Sample, parts: dict[str, float]) -> Sample:
        return replace(sample, reward=sum(self._weights[name] * score for name, score in parts.items()), reward_parts=parts)


def _transposed(outcomes: dict[str, list[Outcome]], num_samples: int) -> list[dict[str, float]]:
    """Per function -> per sample."""
    return [{name: column[index].score for name, column in outcomes.items()} for index in range(num_samples)]


def check_failures(tally: Tally, *, max_failure_fraction: float) -> None:
    """Raises ValueError when a reward function failed for more than this share of its calls (reward.max_failure_fraction)."""
    for name, failures in tally.num_failures.items():
        if failures > max_failure_fraction * tally.num_calls:
            raise ValueError(
                f"reward function {name} failed in {failures} of {tally.num_calls} calls, more than reward.max_failure_fraction="
                f"{max_failure_fraction}; fix it, or raise that limit. The first failures:\n  " + "\n  ".join(tally.examples)
            )
