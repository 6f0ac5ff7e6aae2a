"""Stage 8: accumulated gradients -> updated weights. Builds Megatron's optimizer and learning-rate schedule, and takes one step with them.

Gradients arrive reduced over data-parallel ranks (by the pipeline schedule's last act); zeroing them is the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megagrpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Example: StepResult(grad_norm=0.62, skipped=False, lr=1e-6)."""

    grad_norm: float  # global, before clipping; not finite where the step was skipped
    skipped: bool  # nothing was changed: weights, optimizer state and schedule are as before
    lr: float  # learning rate of this update (of the last one, if this one was skipped)


def build_optimizer(config: Config, ddp_chunks: list[DistributedDataParallel]) -> ChainedOptimizer:
    """Megatron's optimizer over the model chunks of this rank, with fp32 main weights under bf16 ones. Collective over all ranks.

    Norms and biases have no weight decay (Megatron's default, for every parameter of one dimension).
    """
    settings = config.optimizer
    optimizer_config = OptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        sgd_momentum=0.0,
        clip_grad=settings.clip_grad,
        bf16=config.model.dtype == "bfloat16",
        params_dtype=getattr(torch, config.model.dtype),
        use_distributed_optimizer=config.actor.use_distributed_optimizer,
    )
    return get_megatron_optimizer(optimizer_config, ddp_chunks)


def build_scheduler(config: Config, optimizer: ChainedOptimizer, total_updates: int) -> OptimizerParamScheduler:
    """The learning rate of every update of the run: linear warm-up, then constant or decaying from lr towards min_lr.

    With W = lr_warmup_steps, update k = 1, 2, ... of N = total_updates has lr x k / W up to k = W, then the decay's value at
    (k - W) / (N + 1 - W): no update is wasted at rate 0, neither the first nor, with min_lr 0, the last.
    """
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        # A run may end within its warm-up, as a short trial of a recipe does.
        lr_decay_steps=max(total_updates, settings.lr_warmup_steps) + 1,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_updates,
        wd_incr_style="constant",
    )


@torch.no_grad()
def optimizer_step(optimizer: ChainedOptimizer, scheduler: OptimizerParamScheduler) -> StepResult:
    """Clip the gradients to their global norm and update the weights; skip the step when that norm is not finite.

    The norm is one number for all ranks, so all take or all skip the step. Megatron's own step() would go on and spread the NaN
    (megatron/core/optimizer/optimizer.py): of its parts, the norm comes first here. Collective over all ranks.
    """
    found_inf = optimizer.prepare_grads()
    assert not found_inf, "only a loss scaler reports this, and bf16 and fp32 have none"
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return StepResult(grad_norm=grad_norm, skipped=True, lr=scheduler.get_lr({}))

    max_norm = optimizer.config.clip_grad
    for part in optimizer.chained_optimizers:
        if max_norm > 0 and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
    scheduler.step(1)
    succeeded = optimizer.step_with_ready_grads()
    assert succeeded, "step_with_ready_grads reports failure only under fp16"
    return StepResult(grad_norm=grad_norm, skipped=False, lr=scheduler.get_lr({}))
