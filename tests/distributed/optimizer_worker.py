"""One rank of test_optimizer_step.py: takes optimizer steps with made-up gradients, one of them not finite, in every case given.

Arguments: a JSON file {"models": {name: folder}, "cases": {name: {"model", "dtype", "optimizer", "actor"}}}.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.config.schema import Config
from megagrpo.hf_mapping.families import mapping_for
from megagrpo.hf_mapping.folder import load_hf_weights, read_config
from megagrpo.mcore.cpu import prepare_cpu
from megagrpo.mcore.model import build_model, wrap_ddp
from megagrpo.mcore.parallel import init_distributed, init_model_parallel
from megagrpo.optimizer import build_optimizer, build_scheduler, optimizer_step

LR, WEIGHT_DECAY, CLIP_GRAD = 1e-2, 0.1, 1.0
TOTAL_UPDATES, WARMUP = 5, 2
POISON = {2: math.nan, 3: math.inf}  # update -> what one gradient of the last rank becomes
NUM_UPDATES = 6


def run_case(folder, config, device):
    parallel = init_model_parallel(config, device)
    hf = read_config(folder)
    chunks = build_model(hf, config, parallel)
    load_hf_weights(
        chunks,
        folder,
        mapping_for(hf),
        tensor=(parallel.tp_rank, parallel.tp_size),
        expert_tensor=(parallel.etp_rank, parallel.etp_size),
    )
    ddp = wrap_ddp(chunks, config)
    optimizer = build_optimizer(config, ddp)
    scheduler = build_scheduler(config, optimizer, TOTAL_UPDATES)
    reference = Reference(chunks, config) if parallel.dp_size == dist.get_world_size() and parallel.ep_size == 1 else None

    rates = []
    for update in range(NUM_UPDATES):
        before = snapshot(chunks, optimizer, scheduler)
        set_gradients(ddp, update, parallel.dp_rank, poison=POISON.get(update) if parallel.rank == parallel.world_size - 1 else None)
        result = optimizer_step(optimizer, scheduler)
        if update in POISON:
            assert result.skipped and not math.isfinite(result.grad_norm), f"update {update}: {result}"
            after = snapshot(chunks, optimizer, scheduler)
            assert before.keys() == after.keys()
            for name, value in before.items():
                same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
                assert same, f"update {update} was skipped, but {name} changed"
            continue
        assert not result.skipped, f"update {update}: {result}"
        rates.append(result.lr)
        if reference:
            grad_norm = reference.step(update, result.lr, num_ranks=parallel.dp_size)
            assert math.isclose(result.grad_norm, grad_norm, rel_tol=1e-5), f"{result.grad_norm} is not {grad_norm}"
            reference.compare(chunks)
    # warm-up 1/2, 2/2, then cosine over the 4 parts that are left until the end of the run
    expected = [LR / 2, LR] + [LR * 0.5 * (1 + math.cos(math.pi * part / 4)) for part in (1, 2)]
    assert all(map(math.isclose, rates, expected)), f"{rates} is not {expected}"


class Reference:
    """The same updates by torch's optimizer and gradient clipping on the whole model in fp32."""

    def __init__(self, chunks, config):
        self._dtype = getattr(torch, config.model.dtype)
        self._parameters = [torch.nn.Parameter(p.detach().float()) for chunk in chunks for p in chunk.parameters()]
        groups = [
            {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self._parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        kind = torch.optim.AdamW if config.optimizer.optimizer == "adam" else torch.optim.SGD
        self._optimizer = kind(groups, lr=LR)

    def step(self, update, lr, *, num_ranks):
        for i, parameter in enumerate(self._parameters):
            parameter.grad = sum(made_up_gradient(parameter, update, i, rank) for rank in range(num_ranks)) / num_ranks
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_GRAD).item()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return grad_norm

    def compare(self, chunks):
        ours = [p for chunk in chunks for p in chunk.parameters()]
        for i, (parameter, wanted) in enumerate(zip(ours, self._parameters, strict=True)):
            # in bf16 the fp32 main weights may round to neighbours
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if self._dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
            torch.testing.assert_close(parameter.float(), wanted.to(self._dtype).float(), msg=lambda m, i=i: f"{i}: {m}", **tolerance)


def set_gradients(ddp, update, dp_rank, *, poison):
    parameters = [parameter for chunk in ddp for parameter in chunk.parameters()]
    for chunk in ddp:
        chunk.zero_grad_buffer()
    for i, parameter in enumerate(parameters):
        parameter.main_grad.copy_(made_up_gradient(parameter, update, i, dp_rank))
    if poison is not None:
        experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
        (experts or parameters)[-1].main_grad.view(-1)[-1] = poison  # no other rank has this expert, where there are experts
    for chunk in ddp:
        chunk.finish_grad_sync()


def made_up_gradient(parameter, update, index, dp_rank):
    generator = torch.Generator().manual_seed(1000 * update + 10 * index + dp_rank)
    return torch.randn(parameter.shape, generator=generator)


def snapshot(chunks, optimizer, scheduler):
    """Everything a step may change, copied."""
    values = {f"chunk {c} {name}": p for c, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    for o, part in enumerate(optimizer.chained_optimizers):
        for i, main in enumerate(part.get_parameters()):
            values[f"main {o} {i}"] = main
            values |= {f"state {o} {i} {key}": value for key, value in part.optimizer.state[main].items()}
        values |= {f"group {o} {i} {key}": group[key] for i, group in enumerate(part.param_groups) for key in ("lr", "weight_decay")}
    values |= {f"scheduler {key}": value for key, value in scheduler.state_dict().items()}
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def main():
    from megatron.core import parallel_state

    plan = json.loads(Path(sys.argv[1]).read_text())
    device = init_distributed(Config())
    if device.type == "cpu":
        prepare_cpu()
    for name, case in plan["cases"].items():
        settings = {
            "optimizer": case["optimizer"],
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP_GRAD,
            "lr_warmup_steps": WARMUP,
            "lr_decay_style": "cosine",
        }
        config = Config.model_validate({"model": {"dtype": case["dtype"]}, "actor": case["actor"], "optimizer": settings})
        try:
            run_case(plan["models"][case["model"]], config, device)
        except AssertionError as error:
            error.add_note(f"in case {name}")
            raise
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
