"""Core attention for Megatron's local layer spec: packed (THD) or padded (SBHD) sequences, causal, without TransformerEngine.

Queries, keys and values of this rank's heads -> attended values. Covers grouped queries, a sliding window, softcap, sinks, and values
of another width than keys; sequences of a pack never see each other.
"""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import attention_mask_func
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """Drop-in for megatron/core/transformer/dot_product_attention.py, which cannot take packed sequences.

    With masked_softmax_fusion the scores go through Megatron's FusedScaleMaskSoftmax (apex kernels where installed), else through
    torch's scaled_dot_product_attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism needs TransformerEngine's attention"
        assert attn_mask_type == AttnMaskType.causal, f"only causal attention is implemented, not {attn_mask_type}"
        self.scale = softmax_scale if softmax_scale is not None else (k_channels or config.kv_channels) ** -0.5
        self.fused_softmax = config.masked_softmax_fusion
        if self.fused_softmax:
            self.softmax = FusedScaleMaskSoftmax(
                input_in_fp16=config.fp16,
                input_in_bf16=config.bf16,
                attn_mask_type=AttnMaskType.causal,
                scaled_masked_softmax_fusion=True,
                mask_func=attention_mask_func,
                softmax_in_fp32=True,
                scale=self.scale,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> Tensor:
        """Packed: [T, heads, d] each -> [T, heads * d_value]. Padded: [S, B, heads, d] -> [S, B, heads * d_value]."""
        assert attention_bias is None, "an attention bias is not implemented"
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, heads, S, d]
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (query, key, value)), strict=True)
        attended = torch.cat([self._attend(q, k, v) for q, k, v in parts], dim=2)
        return attended.squeeze(0).transpose(0, 1).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, heads, S, d] queries and [B, groups, S, d] keys and values of one length -> [B, heads, S, d_value]."""
        repeats = q.shape[1] // k.shape[1]
        if self.fused_softmax:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
            return self.softmax(q @ k.transpose(-1, -2), None) @ v
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=repeats > 1)
