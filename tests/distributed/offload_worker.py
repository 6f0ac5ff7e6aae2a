"""A real actor whose weights, gradients and optimizer state are parked between two updates, against one left alone.

offload_worker.py MODEL_DIR [section.key=value ...]
"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from tiny_models import make_samples

from megagrpo.actor import Actor
from megagrpo.batching import make_mini_batches
from megagrpo.config.loader import load_config
from megagrpo.hf_mapping.families import mapping_for
from megagrpo.hf_mapping.folder import read_config
from megagrpo.mcore.cpu import prepare_cpu
from megagrpo.mcore.offload import Parking, gradient_storages, optimizer_storages, parameter_storages
from megagrpo.mcore.parallel import init_distributed, init_model_parallel

folder = sys.argv[1]
config = load_config([f"model.path={folder}", "trainer.device=cpu", "algorithm.kl_coef=0.0", *sys.argv[2:]])
device = init_distributed(config)
prepare_cpu()
parallel = init_model_parallel(config, device)
hf = read_config(folder)
samples = make_samples()
batch = {"dp_rank": parallel.dp_rank, "dp_size": parallel.dp_size, "device": device, "pad_to_multiple_of": 1, "multiple_of": 1}
micro_batches = make_mini_batches(samples, np.linspace(-1, 1, len(samples)), config, **batch)[0]


def trained(*, parked: bool) -> Actor:
    actor = Actor(hf, folder, mapping_for(hf), config, parallel, total_updates=3)
    parkings = Parking(keep_content=True), Parking(keep_content=False), Parking(keep_content=True)
    for _ in range(3):
        actor.update(micro_batches, old_logprobs=None, ref_logprobs=None)
        if not parked:
            continue
        actor.optimizer.zero_grad()
        storages = (
            parameter_storages(actor.ddp),
            gradient_storages(actor.ddp),
            optimizer_storages(actor.optimizer, actor.ddp),
        )
        sizes = [sum(tensor.untyped_storage().size() for tensor in tensors) for tensors in storages]
        held = sum(p.numel() for p in actor.ddp[0].parameters())
        assert sizes[0] >= 2 * held and sizes[1] >= 4 * held, "bf16 weights and fp32 gradients"
        optimizer_bytes = torch.tensor(sizes[2])
        dist.all_reduce(optimizer_bytes)  # with the distributed optimizer the ranks hold parts
        assert optimizer_bytes >= 12 * held, "fp32 weights and two moments"
        for parking, tensors in zip(parkings, storages, strict=True):
            parking.release(tensors)
        everything = [p for p in actor.ddp[0].parameters()] + [p.main_grad for p in actor.ddp[0].parameters()]
        assert sum(tensor.untyped_storage().size() for tensor in everything) == 0
        for part in actor.optimizer.chained_optimizers:
            states = [value for state in part.optimizer.state.values() for value in state.values() if value.dim()]
            assert states and sum(value.untyped_storage().size() for value in states) == 0
        for parking in parkings:
            parking.restore()
        assert all(p.main_grad.abs().sum() == 0 for p in actor.ddp[0].parameters()), "gradients come back as zeros"
    return actor


left_alone, parked = trained(parked=False), trained(parked=True)
for (name, expected), actual in zip(left_alone.chunks[0].named_parameters(), parked.chunks[0].parameters(), strict=True):
    assert torch.equal(expected, actual), f"{name} was changed by parking"
if dist.get_rank() == 0:
    sys.stdout.write("parked\n")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
