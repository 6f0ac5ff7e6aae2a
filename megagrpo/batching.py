"""Stage 5: samples -> packed, balanced micro-batches for this data-parallel rank.

Planning is a pure function of the lengths, the same on every rank. Invariants of a plan: every sample is in exactly one micro-batch;
every data-parallel rank has the same number of micro-batches, a multiple of what the schedule asks for; a micro-batch is within the
token budget unless one sample alone exceeds it; a micro-batch is empty (a dummy that adds nothing to the loss) only where there are
fewer samples than micro-batches.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch

from megagrpo.config.schema import Config
from megagrpo.loss import token_weights
from megagrpo.types import MicroBatch, Sample

_ATTENTION_COST = 1 / 8192  # of a token pair over that of a token: attention costs as much as the rest at some 8k tokens


def make_mini_batches(
    samples: list[Sample],
    advantages: np.ndarray,
    config: Config,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    multiple_of: int = 1,
) -> list[list[MicroBatch]]:
    """The micro-batches of this data-parallel rank for every optimizer step of one pass over the samples.

    samples: all of the step, by id; advantages [num_samples]. Whole groups go to an optimizer step, in order. multiple_of: what the
    number of micro-batches must be divisible by (the pipeline size under an interleaved schedule).
    """
    actor = config.actor
    pad_to = actor.tensor_model_parallel_size if actor.sequence_parallel else 1
    mini_batches = []
    for members in split_groups(samples, config.algorithm.num_mini_batches):
        weights = token_weights(
            np.array([len(samples[i].response_ids) for i in members]),
            config.algorithm.loss_aggregation,
            max_response_length=config.rollout.max_response_length,
        )
        lengths = np.array([len(samples[i].prompt_ids) + len(samples[i].response_ids) for i in members])
        plan = plan_micro_batches(lengths, dp_size=dp_size, max_tokens=actor.max_tokens_per_micro_batch, multiple_of=multiple_of)
        mini_batches.append(
            [
                pack(
                    [samples[members[i]] for i in chosen],
                    advantages[[members[i] for i in chosen]],
                    weights[chosen],
                    pad_to_multiple_of=pad_to,
                    device=device,
                )
                for chosen in plan[dp_rank]
            ]
        )
    return mini_batches


def split_groups(samples: list[Sample], num_parts: int) -> list[list[int]]:
    """Positions of the samples of every part; groups stay whole, parts are equal but for one group."""
    groups: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(position)
    parts = np.array_split(np.arange(len(groups)), num_parts)
    members = list(groups.values())
    return [[position for group in part for position in members[group]] for part in parts]


def plan_micro_batches(lengths: np.ndarray, *, dp_size: int, max_tokens: int, multiple_of: int = 1) -> list[list[list[int]]]:
    """Which sequences go into which micro-batch of which data-parallel rank: plan[dp_rank][micro_batch] = indices into lengths.

    lengths [N] in tokens. Sequences are packed first-fit in decreasing length, the costliest bins are halved until every rank gets as
    many, and bins are dealt out, the costliest first, each to the rank that has the least to do.
    """
    packed = _first_fit(lengths, max_tokens)
    unit = dp_size * multiple_of
    num_bins = -(-len(packed) // unit) * unit
    bins = _split_until(packed, num_bins, lengths)
    costs = [float(_cost(lengths[chosen]).sum()) for chosen in bins]

    per_rank = num_bins // dp_size
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    loads = [(0.0, rank) for rank in range(dp_size)]
    for i in sorted(range(num_bins), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(bins[i])
        if len(ranks[rank]) < per_rank:
            heapq.heappush(loads, (load + costs[i], rank))
    return ranks


def pack(
    samples: list[Sample], advantages: np.ndarray, weights: np.ndarray, *, pad_to_multiple_of: int, device: torch.device
) -> MicroBatch:
    """One micro-batch of the samples end to end; of none, a dummy.

    advantages, weights: one number per sample, given to each of its response tokens. Padding is a sequence of its own, so that no
    real token attends to it and cu_seqlens ends at T.
    """
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in samples]
    num_tokens = sum(map(len, sequences))
    padding = -num_tokens % pad_to_multiple_of if num_tokens else pad_to_multiple_of
    lengths = [len(sequence) for sequence in sequences] + ([padding] if padding else [])
    total = num_tokens + padding

    tokens, targets, positions = (np.zeros(total, np.int64) for _ in range(3))
    mask = np.zeros(total, bool)
    token_advantages, token_weights_ = np.zeros(total, np.float32), np.zeros(total, np.float32)
    rollout_logprobs = np.full(total, np.nan, np.float32)
    starts = np.cumsum([0, *lengths])
    for start, length in zip(starts, lengths, strict=False):
        positions[start : start + length] = np.arange(length)
    for start, sequence, sample, advantage, weight in zip(starts, sequences, samples, advantages, weights, strict=False):
        end = start + len(sequence)
        tokens[start:end] = sequence
        targets[start : end - 1] = sequence[1:]
        predicting = slice(start + len(sample.prompt_ids) - 1, end - 1)  # the positions whose next token is a response token
        mask[predicting] = True
        token_advantages[predicting] = advantage
        token_weights_[predicting] = weight
        if sample.rollout_logprobs is not None:
            rollout_logprobs[predicting] = sample.rollout_logprobs

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        token_ids=tensor(tokens),
        position_ids=tensor(positions),
        target_ids=tensor(targets),
        mask=tensor(mask),
        advantages=tensor(token_advantages),
        weights=tensor(token_weights_),
        rollout_logprobs=tensor(rollout_logprobs),
        cu_seqlens=tensor(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        sample_ids=tuple(sample.id for sample in samples),
    )


def _cost(lengths: np.ndarray) -> np.ndarray:
    return lengths * (1 + lengths * _ATTENTION_COST)


def _first_fit(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Indices of the sequences, longest first, each in the first bin that has room for it."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in np.argsort(-lengths, kind="stable"):
        place = next((b for b, room in enumerate(free) if room >= lengths[i]), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[place].append(int(i))
        free[place] -= int(lengths[i])
    return bins


def _split_until(bins: list[list[int]], num_bins: int, lengths: np.ndarray) -> list[list[int]]:
    """Halve the costliest bin of several sequences until there are num_bins; without any left to halve, add empty ones."""
    heap = [(-float(_cost(lengths[members]).sum()), members) for members in bins]
    heapq.heapify(heap)
    whole: list[list[int]] = []
    while len(whole) + len(heap) < num_bins and heap:
        _, members = heapq.heappop(heap)
        if len(members) == 1:
            whole.append(members)
            continue
        for half in (members[::2], members[1::2]):  # members are sorted by length: alternating ones are alike
            heapq.heappush(heap, (-float(_cost(lengths[half]).sum()), half))
    full = whole + [members for _, members in heap]
    return full + [[] for _ in range(num_bins - len(full))]
