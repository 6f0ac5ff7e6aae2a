"""Stage 5: the samples of a step -> packed micro-batches, per optimizer step, of this data-parallel rank. No communication.

Every rank plans for all ranks, from the same samples, so the plans agree. What plan_micro_batches promises (the tests assert it):
  1. every sample is in exactly one micro-batch;
  2. a micro-batch of more than one sample has at most max_tokens tokens;
  3. all ranks have the same number of micro-batches, a multiple of what the pipeline schedule needs;
  4. no micro-batch is empty as long as there are samples for all, and no rank as long as there are samples for all ranks;
  5. the same input gives the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from megagrpo.config.schema import Config
from megagrpo.loss import token_weights
from megagrpo.types import MicroBatch, Sample

_BALANCE_LENGTH = 12 * 2048  # tokens at which attention costs as much as the matrix products of a layer, for a hidden size of 2048


def make_mini_batches(
    samples: list[Sample],
    advantages: np.ndarray,
    config: Config,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    pad_to_multiple_of: int,
    multiple_of: int,
) -> list[list[MicroBatch]]:
    """For every optimizer step of one pass over the samples, the micro-batches of data-parallel rank dp_rank.

    samples: all of the step, the same on every rank, whole groups; advantages [num_samples]. A pack's token count is a multiple of
    pad_to_multiple_of (tensor-parallel size with sequence parallel), their number one of multiple_of (pipeline stages if interleaved).
    """
    mini_batches = []
    for members in split_mini_batches(np.array([sample.group for sample in samples]), config.algorithm.num_mini_batches):
        mini_batch = [samples[i] for i in members]
        weights = token_weights(
            np.array([len(sample.response_ids) for sample in mini_batch]),
            aggregation=config.algorithm.loss_aggregation,
            max_response_length=config.rollout.max_response_length,
        )
        lengths = np.array([len(sample.prompt_ids) + len(sample.response_ids) for sample in mini_batch])
        plan = plan_micro_batches(lengths, dp_size=dp_size, max_tokens=config.actor.max_tokens_per_micro_batch, multiple_of=multiple_of)
        mini_batches.append(
            [
                pack(mini_batch, chosen, advantages[members], weights, pad_to_multiple_of=pad_to_multiple_of, device=device)
                for chosen in plan[dp_rank]
            ]
        )
    return mini_batches


def split_mini_batches(groups: np.ndarray, num_mini_batches: int) -> list[np.ndarray]:
    """Positions of the samples of each mini-batch: whole groups in order, as equal in number as possible.

    groups [num_samples]: the group of every sample. Example: groups [0, 0, 1, 1, 2, 2], 2 mini-batches -> [0, 1, 2, 3], [4, 5].
    """
    distinct = np.unique(groups)
    assert len(distinct) >= num_mini_batches, f"{len(distinct)} groups cannot fill {num_mini_batches} mini-batches"
    return [np.flatnonzero(np.isin(groups, part)) for part in np.array_split(distinct, num_mini_batches)]


def plan_micro_batches(lengths: np.ndarray, *, dp_size: int, max_tokens: int, multiple_of: int = 1) -> list[list[list[int]]]:
    """Which samples each data-parallel rank packs into each of its micro-batches: plan[dp_rank][micro_batch] = indices into lengths.

    lengths [N]: tokens of prompt and response. The promises are in the docstring of this file. Both levels give the longest first to
    whoever has least so far (LPT): samples to micro-batches by tokens, micro-batches to ranks by cost with attention counted.
    """
    unit = dp_size * multiple_of
    num_bins, most_bins = (_round_up(int(n), unit) for n in (max(-(-lengths.sum() // max_tokens), 1), max(len(lengths), 1)))
    num_bins = min(num_bins, most_bins)
    while (bins := _fill_bins(lengths, num_bins, max_tokens)) is None:
        num_bins = min(_round_up(num_bins + max(unit, num_bins // 64), unit), most_bins)
    costs = np.array([(lengths[chosen] * (_BALANCE_LENGTH + lengths[chosen])).sum() if chosen else 0 for chosen in bins])
    return _share_out(bins, costs, dp_size)


def _fill_bins(lengths: np.ndarray, num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Spread the samples evenly over num_bins; None if one of them does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, b) for b in range(num_bins)]
    for i in np.argsort(-lengths, kind="stable"):
        load, b = emptiest[0]
        if load and load + lengths[i] > max_tokens:
            return None  # nor does it fit into any fuller one
        bins[b].append(int(i))
        heapq.heapreplace(emptiest, (load + int(lengths[i]), b))
    return bins


def _share_out(bins: list[list[int]], costs: np.ndarray, dp_size: int) -> list[list[list[int]]]:
    """The same number of bins for every rank, of about the same total cost; expensive ones come first."""
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    idlest = [(0, rank) for rank in range(dp_size)]
    for b in np.argsort(-costs, kind="stable"):
        cost, rank = heapq.heappop(idlest)
        ranks[rank].append(bins[b])
        if len(ranks[rank]) < len(bins) // dp_size:
            heapq.heappush(idlest, (cost + int(costs[b]), rank))
    return ranks


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    advantages: np.ndarray,
    weights: np.ndarray,
    *,
    pad_to_multiple_of: int,
    device: torch.device,
) -> MicroBatch:
    """The chosen samples end to end, as types.MicroBatch describes; advantages and weights [num_samples] go to their response tokens.

    Padding up to a multiple of pad_to_multiple_of tokens is a sequence of its own. Without any sample the pack is all padding: a dummy.
    """
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in chosen]
    padding = _round_up(max(sum(lengths), 1), pad_to_multiple_of) - sum(lengths)
    total = sum(lengths) + padding
    if padding:
        lengths.append(padding)
    ends = np.cumsum(lengths)
    starts = ends - lengths

    token_ids = np.zeros(total, dtype=np.int64)
    target_ids = np.zeros(total, dtype=np.int64)
    mask = np.zeros(total, dtype=bool)
    token_advantages, token_weight, rollout_logprobs = (np.zeros(total, dtype=np.float32) for _ in range(3))
    rollout_logprobs[:] = np.nan
    for sample, i, start, end in zip(chosen, indices, starts, ends, strict=False):  # the last start may be the padding's
        assert len(sample.prompt_ids) and len(sample.response_ids), f"sample {sample.id} has an empty prompt or response"
        token_ids[start:end] = np.concatenate([sample.prompt_ids, sample.response_ids])
        target_ids[start : end - 1] = token_ids[start + 1 : end]
        predicting = slice(start + len(sample.prompt_ids) - 1, end - 1)  # position t predicts token t + 1
        mask[predicting] = True
        token_advantages[predicting] = advantages[i]
        token_weight[predicting] = weights[i]
        if sample.rollout_logprobs is not None:
            rollout_logprobs[predicting] = sample.rollout_logprobs

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        token_ids=tensor(token_ids),
        position_ids=tensor(np.arange(total) - np.repeat(starts, lengths)),
        target_ids=tensor(target_ids),
        mask=tensor(mask),
        advantages=tensor(token_advantages),
        weights=tensor(token_weight),
        rollout_logprobs=tensor(rollout_logprobs),
        cu_seqlens=tensor(np.concatenate([[0], ends]).astype(np.int32)),
        max_seqlen=max(lengths),
        sample_ids=tuple(sample.id for sample in chosen),
    )
