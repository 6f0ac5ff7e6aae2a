"""The data that travels between stages: prompts -> samples -> micro-batches. Plain frozen dataclasses, no behaviour.

Shapes: P prompt tokens, R response tokens, S sequences in a pack, T tokens of a pack (all sequences end to end, padding last).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised row of the dataset.

    Example: Prompt(id=7, text="2+3=", token_ids=[5, 12, 6, 11], columns={"answer": "5"})
    """

    id: int  # the row's position in its dataset: the same in every run and epoch
    text: str  # what the tokens decode to, chat template included
    token_ids: list[int]  # [P]
    columns: dict[str, Any]  # every column of the row (`answer` and whatever rewards ask for)


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt, with what is known of it so far (rewards are filled in by the reward stage).

    Example: with 4 samples per prompt, sample 6 of a step is the third response (6 % 4 == 2) to its second prompt (6 // 4 == 1).
    """

    id: int  # position in the step: group * num_samples_per_prompt + index within the group
    group: int  # position of the prompt in the step: samples of one group answer one prompt
    prompt_id: int
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32, R >= 1, the stop token included when there is one
    rollout_logprobs: np.ndarray | None  # [R] float32, what the engine sampled with; None when it was not asked for
    finish_reason: str  # "stop" or "length" (truncated)
    reward: float = float("nan")  # weighted sum of the parts
    reward_parts: dict[str, float] = field(default_factory=dict)  # per reward function, unweighted


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed end to end for one forward pass; position t holds what is known of token t+1, which it predicts.

    Example: one sequence, prompt [5, 6], response [7, 8]: token_ids [5, 6, 7, 8], target_ids [6, 7, 8, 0],
    mask [F, T, T, F], cu_seqlens [0, 4]. Where mask is False, every other per-token field is meaningless.
    """

    token_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarting at 0 in every sequence
    target_ids: torch.Tensor  # [T] int64, the next token of the same sequence
    mask: torch.Tensor  # [T] bool, True where the target is a response token
    advantages: torch.Tensor  # [T] float32
    weights: torch.Tensor  # [T] float32, of each token in the loss, decided for the whole optimizer step (loss.token_weights)
    rollout_logprobs: torch.Tensor  # [T] float32, NaN where the engine was not asked
    cu_seqlens: torch.Tensor  # [S+1] int32, where each sequence starts; the last entry is T
    max_seqlen: int
    sample_ids: tuple[int, ...]  # of the S sequences in order, padding excluded; empty in a dummy micro-batch
