"""Core attention for Megatron's local layer spec: packed (THD) or padded (SBHD) sequences, causal, without TransformerEngine.

Queries, keys and values of this rank's heads -> attended values. Covers grouped queries, sliding windows, softcap, sinks, and values
of another width than keys; sequences of a pack never see each other.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(DotProductAttention):
    """Megatron's DotProductAttention (its scale, window, sinks and their checkpoint layout) with a forward that takes packed sequences.

    Plain causal attention goes through torch's scaled_dot_product_attention, which never holds all scores. With
    masked_softmax_fusion, a window, a softcap or sinks they go through Megatron's FusedScaleMaskSoftmax.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        """softcap: scores become softcap x tanh(scores / softcap) (Gemma 2, arXiv:2408.00118). k_channels, v_channels: MLA's head sizes."""
        if softmax_scale is None and k_channels is not None:
            softmax_scale = k_channels**-0.5
        super().__init__(config, *args, softmax_scale=softmax_scale, **kwargs)
        assert self.attn_mask_type == AttnMaskType.causal, f"only causal attention is implemented, not {self.attn_mask_type}"
        if self.attention_dropout.p > 0:
            raise ValueError("attention_dropout is not implemented in the local layer spec; set it to 0")
        if config.apply_query_key_layer_scaling:
            raise ValueError("apply_query_key_layer_scaling is not implemented in the local layer spec; set it to false")
        self.softcap = softcap
        if self.scale_mask_softmax.window_size is not None:
            self.scale_mask_softmax.scaled_masked_softmax_fusion = False  # Megatron would pick apex's kernel, which ignores the window
        self.needs_scores = (
            self.scale_mask_softmax.scaled_masked_softmax_fusion
            or self.scale_mask_softmax.window_size is not None
            or self.softmax_offset is not None
            or softcap is not None
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
    ) -> Tensor:
        """Packed: [T, heads, d] each -> [T, heads * d_value]. Padded: [S, B, heads, d] -> [S, B, heads * d_value].

        attention_mask and attn_mask_type are not read: attention is causal within each sequence.
        """
        assert attention_bias is None, "an attention bias is not implemented"
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        sequences = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (query, key, value)), strict=True)
        attended = torch.cat([self._attend(q, k, v) for q, k, v in sequences], dim=2)
        return attended.squeeze(0).transpose(0, 1).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, heads, S, d] queries and [B, groups, S, d] keys and values of one length -> [B, heads, S, d_value]."""
        repeats = q.shape[1] // k.shape[1]
        if not self.needs_scores:
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=repeats > 1)
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = (q * self.softmax_scale) @ k.transpose(-1, -2)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return self.scale_mask_softmax(scores, None, self.softmax_offset) @ v
