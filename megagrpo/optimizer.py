"""Stage 8: gradients -> updated weights, by Megatron's optimizer and learning-rate schedule.

A step whose gradient norm is not finite changes nothing, on any rank: neither weights nor moments nor the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megagrpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float  # before clipping, over all ranks; not finite when skipped
    lr: float  # the step was taken with
    skipped: bool


def build_optimizer(config: Config, ddp_chunks: list) -> MegatronOptimizer:
    """Megatron's optimizer over the DDP-wrapped chunks: fp32 master weights for bf16, no weight decay on norms and biases."""
    optimizer, bf16 = config.optimizer, config.model.dtype == "bfloat16"
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optimizer.optimizer,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_eps=optimizer.adam_eps,
            sgd_momentum=0.0,
            clip_grad=optimizer.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=config.actor.use_distributed_optimizer,
        ),
        ddp_chunks,
    )


def build_scheduler(config: Config, optimizer: MegatronOptimizer, total_updates: int) -> OptimizerParamScheduler:
    """Warm-up and decay over total_updates optimizer steps. The first update has 1/lr_warmup_steps of the peak, not 0."""
    settings = config.optimizer
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=max(total_updates, settings.lr_warmup_steps + 1),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(1)
    return scheduler


@torch.no_grad()
def optimizer_step(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> StepResult:
    """Clip to the global norm and update, unless the norm is not finite. Collective over all ranks.

    The parts are those of ChainedOptimizer.step in megatron/core/optimizer/optimizer.py, which would update before one could look.
    """
    lr = max(group["lr"] for group in optimizer.param_groups)
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return StepResult(grad_norm, lr, skipped=True)
    max_norm = optimizer.config.clip_grad
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if max_norm > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
    scheduler.step(1)
    return StepResult(grad_norm, lr, skipped=False)
