"""Offloading on a real model and optimizer: every byte of device storage is given back, and training goes on bit for bit."""

import pytest
from torchrun import run_workers


@pytest.mark.parametrize("distributed_optimizer", ["true", "false"])
def test_parked_training_is_the_same(distributed_optimizer, tiny_models):
    output = run_workers(
        "offload_worker.py",
        tiny_models["qwen2"],
        f"actor.use_distributed_optimizer={distributed_optimizer}",
        "optimizer.lr=0.01",
        num_processes=2,
    )
    assert "parked" in output
