"""Fixtures of the unit tests."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def world_of_one():
    """A process group of this process alone, and what Megatron needs on CPU: its modules ask for a tensor-parallel group."""
    from megagrpo.mcore.cpu import prepare_cpu

    if not torch.cuda.is_available():
        prepare_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
