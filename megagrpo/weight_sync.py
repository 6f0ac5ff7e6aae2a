"""Stage 9: updated Megatron weights -> the live vLLM weights, from any layout to any layout.

Full tensors arrive bucket by bucket (hf_mapping/stream.py); vLLM's own loaders take this rank's part of each, through its layerwise
reload, which repacks what the engine keeps repacked. `verify_weights` then proves that the engine holds what Megatron holds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megagrpo.engine_weights import EngineWeights
from megagrpo.hf_mapping.stream import WeightStream
from megagrpo.rollouts import RolloutEngine

_MAX_NAMES_SHOWN = 12


class WeightMismatchError(RuntimeError):
    """The engine does not hold the trainer's weights."""


@torch.no_grad()
def sync_weights(stream: WeightStream, engine: RolloutEngine, *, bucket_bytes: int) -> None:
    """Replace every weight of the engine by the trainer's. Collective over all ranks.

    Extra memory: bucket_bytes, or twice a larger parameter, plus the layer that straddles its end.
    Method: vllm/model_executor/model_loader/reload.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, model_config = engine.model_and_config()
    live = EngineWeights(model)
    live.forget_packed_experts()
    initialize_layerwise_reload(model)
    for bucket in stream.buckets(bucket_bytes):
        model.load_weights(iter(bucket))
        del bucket  # before the next one is gathered
    finalize_layerwise_reload(model, model_config)
    live.repack_tied_head()
    engine.mark_synced()


@torch.no_grad()
def verify_weights(stream: WeightStream, engine: RolloutEngine, *, bucket_bytes: int) -> int:
    """Compare every tensor the engine holds, on every rank, with the trainer's, bit for bit; return how many were compared.

    Where the engine has repacked a weight, what the live layer computes on a fixed probe is compared instead. Raises
    WeightMismatchError on all ranks, naming the tensors, when one differs or was never sent. Collective over all ranks.
    """
    model, _ = engine.model_and_config()
    live = EngineWeights(model)
    wrong = []
    for bucket in stream.buckets(bucket_bytes):
        wrong += [difference for name, expected in bucket for difference in live.differences(name, expected)]
        del bucket
    wrong += [f"{name} (never sent)" for name in live.unvisited()]

    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, wrong)
    found = [f"{name} on rank {rank}" for rank, names in enumerate(everyone) for name in names]
    if found:
        more = f" and {len(found) - _MAX_NAMES_SHOWN} more" if len(found) > _MAX_NAMES_SHOWN else ""
        raise WeightMismatchError(
            f"{len(found)} tensors of the rollout engine differ from the trainer's: {', '.join(found[:_MAX_NAMES_SHOWN])}{more}"
        )
    return live.num_compared
