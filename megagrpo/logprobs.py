"""Stage 6: the logits of a pack of tokens, split over tensor-parallel ranks -> log-probability of every target, and entropy.

The full vocabulary is never gathered. Arithmetic is fp32 from bf16 logits (fp64 from fp64), a chunk of tokens at a time; the backward
pass computes the softmax anew from the logits, so that nothing else of vocabulary size is kept.
T tokens, V/tp columns of the padded vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_BYTES = 128 * 2**20  # size of a temporary; far above what saturates a device, far below the logits of a large vocabulary


def vocab_parallel_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, if wanted, the entropy in nats, of softmax(logits / temperature) over the whole vocabulary.

    logits [T, V/tp] (this rank's columns), target_ids [T] -> logprobs [T], entropy [T] or None, in fp32 (fp64 from fp64), the same on
    every rank of tp_group (None: the logits are whole). Columns from vocab_size on are padding and have no probability.
    Both results are differentiable; an entropy that is only reported costs the backward pass nothing.
    """
    assert logits.dim() == 2 and target_ids.shape == logits.shape[:1], f"logits {logits.shape}, target_ids {target_ids.shape}"
    tp_rank = 0 if tp_group is None else dist.get_rank(tp_group)
    first_id = tp_rank * logits.shape[1]
    num_columns = min(max(vocab_size - first_id, 0), logits.shape[1])  # without padding; a small vocabulary may leave none
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, target_ids - first_id, num_columns, temperature, tp_group, with_entropy)
    return logprobs, entropy if with_entropy else None


class _VocabParallelLogprobs(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z): logprob = z_target - logsumexp(z), entropy = logsumexp(z) - sum p z."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        num_columns: int,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        valid = logits.detach()[:, :num_columns]
        here = (columns >= 0) & (columns < num_columns)
        columns = columns.where(here, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)

        largest = valid.amax(dim=1) if num_columns else valid.new_full(columns.shape, -torch.inf)
        largest = largest.to(dtype) / temperature
        _all_reduce(largest, dist.ReduceOp.MAX, tp_group)

        # z is taken relative to its maximum from here on: sum of exp(z), z of the target, sum of exp(z) z
        sums = largest.new_zeros(3, len(columns))
        for rows in _row_chunks(valid, dtype) if num_columns else ():
            z = _shifted(valid[rows], largest[rows], temperature)
            sums[1, rows] = z.gather(1, columns[rows, None]).squeeze(1).where(here[rows], 0.0)
            exp = z.exp()
            torch.sum(exp, dim=1, out=sums[0, rows])
            if with_entropy:
                torch.sum(z.mul_(exp), dim=1, out=sums[2, rows])
        _all_reduce(sums, dist.ReduceOp.SUM, tp_group)

        log_sum = sums[0].log()
        logprobs, entropy = sums[1] - log_sum, log_sum - sums[2] / sums[0]
        ctx.save_for_backward(logits, columns, here, largest + log_sum, entropy)
        ctx.num_columns, ctx.temperature = num_columns, temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / dz_j = [j is the target] - p_j and d entropy / dz_j = -p_j (log p_j + entropy), each times 1 / temperature."""
        logits, columns, here, logsumexp, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        valid, grad_logits = logits.detach()[:, : ctx.num_columns], torch.zeros_like(logits)
        for rows in _row_chunks(valid, logsumexp.dtype) if ctx.num_columns else ():
            log_p = _shifted(valid[rows], logsumexp[rows], ctx.temperature)
            p = log_p.exp()
            slope: Tensor | float = 0.0  # what p_j is multiplied by
            if grad_entropy is not None:
                slope = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[rows, None]
            grad_z = p.mul_(slope)
            if grad_logprobs is not None:
                grad_z.scatter_add_(1, columns[rows, None], grad_logprobs[rows].where(here[rows], 0.0)[:, None])
            grad_logits[rows, : ctx.num_columns] = grad_z.div_(ctx.temperature)
        return grad_logits, None, None, None, None, None


def _row_chunks(logits: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of rows, each of about _CHUNK_BYTES in dtype."""
    num_rows = max(1, _CHUNK_BYTES // (logits.shape[1] * dtype.itemsize))
    return (slice(start, start + num_rows) for start in range(0, len(logits), num_rows))


def _shifted(rows: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """rows [R, C] / temperature - shift [R], as a new tensor in the type of shift."""
    return rows.to(shift.dtype, copy=True).div_(temperature).sub_(shift[:, None])


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, tp_group: dist.ProcessGroup | None) -> None:
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        dist.all_reduce(tensor, op=op, group=tp_group)
