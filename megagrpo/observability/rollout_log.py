"""What the model wrote: the samples of a step -> <run>/rollouts/step_000012.jsonl, one row a sample.

The same rows feed the console's sample table. Decodes no tokens: it is given the texts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrpo.observability.jsonl import write_jsonl, writing
from megagrpo.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One sample as a reader wants it. Numbers that are not finite are null.

    Example: RolloutRow(step=12, prompt_id=7, group=0, prompt="2+3=", response="5", reward=1.0, reward_parts={"math_answer": 1.0},
    advantage=0.87, finish_reason="stop", num_prompt_tokens=4, num_response_tokens=2)
    """

    step: int
    prompt_id: int
    group: int
    prompt: str
    response: str
    reward: float | None
    reward_parts: dict[str, float | None]
    advantage: float | None
    finish_reason: str
    num_prompt_tokens: int
    num_response_tokens: int


def rollout_rows(
    samples: Sequence[Sample], *, step: int, prompts: Sequence[Prompt], responses: Sequence[str], advantages: Sequence[float]
) -> list[RolloutRow]:
    """A row per sample, in their order. prompts are the step's, by group; responses (texts) and advantages are per sample."""
    return [
        RolloutRow(
            step=step,
            prompt_id=sample.prompt_id,
            group=sample.group,
            prompt=prompts[sample.group].text,
            response=response,
            reward=_finite(sample.reward),
            reward_parts={name: _finite(value) for name, value in sample.reward_parts.items()},
            advantage=_finite(advantage),
            finish_reason=sample.finish_reason,
            num_prompt_tokens=len(sample.prompt_ids),
            num_response_tokens=len(sample.response_ids),
        )
        for sample, response, advantage in zip(samples, responses, advantages, strict=True)
    ]


def write_rollouts(run_dir: Path, rows: Sequence[RolloutRow]) -> Path:
    """Write the rows of one step and return the file; raises LogWriteError."""
    path = run_dir / "rollouts" / f"step_{rows[0].step:06d}.jsonl"
    with writing(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_jsonl(path, (dataclasses.asdict(row) for row in rows))
    return path


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
