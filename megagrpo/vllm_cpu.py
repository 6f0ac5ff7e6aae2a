"""What vLLM lacks on CPU for engines of several ranks: names of its own for every job's shared memory, and expert parallelism.

Called before an engine starts on CPU; on a GPU none of this is needed.
"""

from __future__ import annotations

import os

import torch


def prepare_vllm_cpu() -> None:
    """Fill the gaps in this process. Once per process, as is the engine."""
    _name_shared_memory_after_this_job()
    _map_experts_to_local_ones()


def _name_shared_memory_after_this_job() -> None:
    """Under external_launcher vLLM gives the shared memory of all jobs on a machine one name (cpu_communicator.py)."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name_in_job = _CPUSHMDistributed.make_group_name
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'megagrpo')}-{os.environ['MASTER_PORT']}"
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{job}{name_in_job(communicator)}".replace("/", ""))


def _map_experts_to_local_ones() -> None:
    """vLLM's CPU expert kernel ignores the expert map: with expert parallelism it reads weights that are on another rank."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_local = CPUUnquantizedExperts.apply

    def apply(self: CPUUnquantizedExperts, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **arguments: object) -> None:
        expert_map = arguments["expert_map"]
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            here = local >= 0
            topk_ids = torch.where(here, local, 0).to(topk_ids.dtype)
            topk_weights = torch.where(here, topk_weights, 0.0)  # the rank that holds the expert adds its part
        apply_local(self, topk_ids=topk_ids, topk_weights=topk_weights, **arguments)

    CPUUnquantizedExperts.apply = apply
