"""Stage 3: the `reasoning_gym` reward: the score that a reasoning-gym task gives to an answer, partial credit included.

Needs the columns `question`, `answer` and `metadata`, which data.train_files=reasoning_gym:<task> brings along (see prompts.py).
"""

from __future__ import annotations

import functools
from typing import Any

from megagrpo.rewards.functions import RewardFunction
from megagrpo.rewards.math_worker import last_boxed


def reasoning_gym_reward(task_config: dict[str, Any]) -> RewardFunction:
    """The reward function for tasks with these settings: some tasks score by them."""
    import reasoning_gym as gym  # a second to import, and optional

    @functools.cache
    def task(name: str) -> Any:
        return gym.create_dataset(name, size=1, seed=0, **task_config)

    def reasoning_gym(response: str, *, question: str, answer: str, metadata: dict[str, Any]) -> float:
        entry = {"question": question, "answer": answer, "metadata": metadata}
        return task(metadata["source_dataset"]).score_answer(_final_answer(response), entry)

    return reasoning_gym


def _final_answer(response: str) -> str:
    """What stands in the last <answer> tag, else in the last \\boxed, else the response itself."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(response)
    boxed = last_boxed(response) if tagged is None else None
    return next(text for text in (tagged, boxed, response) if text is not None).strip()
