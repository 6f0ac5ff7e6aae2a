"""How one Megatron parameter is laid out in Hugging Face tensors: one class per transform, both directions.

A transform turns the tensor-parallel shards of a parameter into its full Hugging Face tensors and cuts one shard out of them.
It knows neither names (rows of families.py) nor process groups (stream.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """Both directions of one layout."""

    sharded: ClassVar[bool]  # whether tensor-parallel ranks hold different parts

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """All shards in rank order (one when replicated) -> the full Hugging Face tensors in the order of the row's names."""

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """The full Hugging Face tensors -> the shard of tensor-parallel rank `rank` of `size`."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every rank (norms, routers)."""

    sharded: ClassVar[bool] = False

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """[...] -> the same."""
        return shards[:1]

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """[...] -> the same."""
        return tensors[0]


@dataclass(frozen=True, slots=True)
class Sliced:
    """Cut into equal parts along one axis: 0 for a column-parallel weight [out, in], 1 for a row-parallel one."""

    axis: int
    sharded: ClassVar[bool] = True

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """size x [out/size, in] (or [out, in/size]) -> [out, in]."""
        return [torch.cat(shards, self.axis) if len(shards) > 1 else shards[0]]

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """[out, in] -> [out/size, in] (or [out, in/size])."""
        length = tensors[0].shape[self.axis] // size
        return tensors[0].narrow(self.axis, rank * length, length)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Embedding or head [vocab, hidden], cut along the vocabulary and padded with zero rows to a multiple of the ranks."""

    vocab_size: int
    sharded: ClassVar[bool] = True

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """size x [ceil(vocab/size), hidden] -> [vocab, hidden]."""
        return [(torch.cat(shards) if len(shards) > 1 else shards[0])[: self.vocab_size]]

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """[vocab, hidden] -> [ceil(vocab/size), hidden]."""
        rows = -(-self.vocab_size // size)
        part = tensors[0][rank * rows : (rank + 1) * rows]
        padding = part.new_zeros(rows - part.shape[0], *part.shape[1:])
        return torch.cat([part, padding]) if len(padding) else part


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """linear_qkv, weight or bias: Megatron interleaves per group of query heads [q.. q k v], Hugging Face keeps q, k, v apart.

    Megatron: SelfAttention.get_query_key_value_tensors in megatron/core/transformer/attention.py.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sharded: ClassVar[bool] = True

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """size x [(heads + 2 kv)/size * d, ...] -> q [heads * d, ...], k [kv * d, ...], v [kv * d, ...]."""
        qkv = torch.cat(shards) if len(shards) > 1 else shards[0]
        rest = qkv.shape[1:]
        per_group = self.num_heads // self.num_kv_heads
        grouped = qkv.reshape(self.num_kv_heads, per_group + 2, self.head_dim, *rest)
        q, k, v = grouped.split([per_group, 1, 1], dim=1)
        return [part.reshape(-1, *rest) for part in (q, k, v)]

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """q, k, v -> the groups of one rank, interleaved."""
        assert self.num_kv_heads % size == 0, f"tensor parallel size {size} does not divide {self.num_kv_heads} KV heads"
        rest = tensors[0].shape[1:]
        groups = self.num_kv_heads // size
        grouped = [t.reshape(self.num_kv_heads, -1, self.head_dim, *rest)[rank * groups : (rank + 1) * groups] for t in tensors]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """linear_fc1 of a gated MLP: every rank holds its part of the gate above its part of the up projection."""

    sharded: ClassVar[bool] = True

    def to_hf(self, shards: list[Tensor]) -> list[Tensor]:
        """size x [2 ffn/size, hidden] -> gate [ffn, hidden], up [ffn, hidden]."""
        halves = [shard.chunk(2) for shard in shards]
        if len(halves) == 1:
            return list(halves[0])
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]

    def to_megatron(self, tensors: list[Tensor], *, rank: int, size: int) -> Tensor:
        """gate, up -> [2 ffn/size, hidden]."""
        return torch.cat([t.chunk(size)[rank] for t in tensors])
