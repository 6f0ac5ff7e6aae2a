"""Micro-batches through Megatron's pipeline schedules: packed inputs in, loss and metrics out of the last stage.

Scales the loss so that Megatron's own factors cancel; what the loss is, its function says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megagrpo.mcore.parallel import Parallel
from megagrpo.types import MicroBatch

LossFunction = Callable[[Tensor, MicroBatch, int], tuple[Tensor, dict[str, Tensor]]]


def forward_backward(
    chunks: list, micro_batches: list[MicroBatch], *, loss_function: LossFunction, parallel: Parallel, forward_only: bool
) -> list[dict[str, Tensor]]:
    """Run the micro-batches of one optimizer step through the model.

    loss_function(logits [T, V/tp], micro_batch, its index) -> (sum of weight x token loss, detached metrics); it is called on the
    last stage. Returns the metrics of every micro-batch in order there, [] on other stages. Gradients are those of the sum over all
    micro-batches and ranks: the schedule multiplies by cp and divides by the number of micro-batches, DDP divides by dp x cp
    (megatron/core/pipeline_parallel/schedules.py, distributed_data_parallel.py), and the factor here undoes both.
    """
    scale = len(micro_batches) * parallel.dp_size

    def forward_step(batches: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Callable]:
        index, micro_batch = next(batches)
        logits = model(
            micro_batch.token_ids.unsqueeze(0),
            micro_batch.position_ids.unsqueeze(0),
            None,
            packed_seq_params=_packed(micro_batch),
        )
        return logits, partial(scaled_loss, micro_batch=micro_batch, index=index)

    def scaled_loss(logits: Tensor, *, micro_batch: MicroBatch, index: int) -> tuple[Tensor, tuple[int, dict[str, Tensor]]]:
        loss, metrics = loss_function(logits.squeeze(0), micro_batch, index)
        return loss * scale, (index, metrics)

    with torch.set_grad_enabled(not forward_only):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(enumerate(micro_batches)) for _ in chunks] if len(chunks) > 1 else iter(enumerate(micro_batches)),
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=max(len(micro_batch.token_ids) for micro_batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [metrics for _, metrics in sorted(results, key=itemgetter(0))]


def _packed(micro_batch: MicroBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
