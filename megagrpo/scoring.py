"""Stage 3 over all ranks: every engine's leader scores what its engine sampled, then all ranks learn of all samples.

Samples of this engine -> all samples of the step, with rewards. How a response is scored is rewards/.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megagrpo.config.schema import Config
from megagrpo.rewards import Scorer, Tally, check_failures
from megagrpo.rollouts import gather_samples
from megagrpo.types import Prompt, Sample


def score_and_gather(
    samples: list[Sample], prompts: list[Prompt], *, scorer: Scorer, tokenizer: Any, config: Config, num_expected: int
) -> tuple[list[Sample], Tally]:
    """All num_expected samples with their rewards, and how the reward functions fared. Collective over all ranks.

    Raises ValueError on every rank when a reward function failed for more than reward.max_failure_fraction of the samples.
    """
    scores = scorer.score(samples, responses=decode(tokenizer, samples), prompts=prompts)
    tallies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tallies, scores.tally)
    tally = Tally.total(tallies)
    check_failures(tally, max_failure_fraction=config.reward.max_failure_fraction)
    return gather_samples(scores.samples, num_expected), tally


def decode(tokenizer: Any, samples: list[Sample]) -> list[str]:
    """The responses as text, without special tokens."""
    # of an empty batch transformers makes one empty text
    return tokenizer.batch_decode([s.response_ids.tolist() for s in samples], skip_special_tokens=True) if samples else []
