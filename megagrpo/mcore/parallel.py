"""Process groups: the default one, and Megatron's over it. Says who this rank is in every kind of parallelism.

Configuration -> Parallel. Ranks are laid out as Megatron does: tensor fastest, then context, data, pipeline
(megatron/core/parallel_state.py); experts replace tensor x context by expert-tensor x expert over the same ranks.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.config.schema import Config

_TIMEOUT = timedelta(minutes=30)  # longer than the slowest phase, in which other ranks may wait


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place in the layout."""

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vpp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    tp_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_loss(self) -> bool:
        """True on one rank of every data-parallel replica, which holds what the loss reports."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def init_distributed(config: Config) -> torch.device:
    """Start the default process group from torchrun's environment (gloo on CPU, nccl on GPU) and choose this rank's device."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device; set trainer.device=cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"{local_rank + 1} processes on this node, but {torch.cuda.device_count()} GPUs; lower --nproc_per_node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # without device_id: with it NCCL connects each of Megatron's thirty groups at once, 0.3 GiB of device memory apiece, used or not
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT)
    return device


def init_model_parallel(config: Config, device: torch.device) -> Parallel:
    """Build Megatron's groups over the default process group and seed every generator. Collective over all ranks."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    actor = config.actor
    ps.initialize_model_parallel(
        tensor_model_parallel_size=actor.tensor_model_parallel_size,
        pipeline_model_parallel_size=actor.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=actor.virtual_pipeline_model_parallel_size,
        context_parallel_size=actor.context_parallel_size,
        expert_model_parallel_size=actor.expert_model_parallel_size,
        expert_tensor_parallel_size=actor.expert_tensor_parallel_size,
    )
    seed = config.trainer.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=ps.get_pipeline_model_parallel_world_size(),
        vpp_size=actor.virtual_pipeline_model_parallel_size or 1,
        cp_rank=ps.get_context_parallel_rank(),
        cp_size=ps.get_context_parallel_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
        tp_group=ps.get_tensor_model_parallel_group(),
    )
