"""RMSNorm for Megatron's local layer spec; the torch norm Megatron offers there refuses sequence parallelism and zero-centred gamma.

Activations [..., hidden] -> the same shape. TransformerEngine's own norm is used with its spec.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gamma, computed in fp32 (Zhang and Sennrich, arXiv:1910.07467).

    The weight carries `sequence_parallel`, by which Megatron sums its gradient over tensor-parallel ranks
    (megatron/core/distributed/finalize_model_grads.py). With layernorm_zero_centered_gamma the weight is gamma - 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.0 if self.zero_centered else 1.0, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], in the input's dtype; rounded where the models' Hugging Face code rounds."""
        x = hidden.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:  # Gemma's way: in bf16, 1 + weight would drop most of the weight
            return (normed * (1.0 + self.weight.float())).to(hidden.dtype)
        return normed.to(hidden.dtype) * self.weight
