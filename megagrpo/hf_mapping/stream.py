"""Megatron shards on many ranks -> full Hugging Face tensors on every rank, bucket by bucket.

Every rank calls it together and receives the same names in the same order, whatever the layout. Who holds which shard is
agreed on once; a shard is then broadcast by the lowest rank that holds it, all shards of one rank and bucket in one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.hf_mapping.names import named_weights
from megagrpo.hf_mapping.table import Group, Mapping

_ALIGNMENT = 16  # bytes: a view of any dtype may start there


@dataclass(frozen=True, slots=True)
class _Shard:
    """One part of a parameter, as the rank that sends it holds it."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


class WeightStream:
    """The weights of a distributed Megatron model as Hugging Face tensors.

    chunks: this rank's GPTModel chunks, without wrappers. tensor_rank and expert_tensor_rank: this rank's place among the ranks
    that share a dense layer and an expert. Creating one is collective over all ranks, and so is iterating it.
    """

    def __init__(
        self, chunks: list[nn.Module], mapping: Mapping, *, tensor_rank: int, expert_tensor_rank: int, device: torch.device
    ) -> None:
        self._device = device
        self._local = dict(named_weights(chunks))
        self._shards = self._agree(mapping, tensor_rank, expert_tensor_rank)
        self._groups = mapping.groups(self._shards)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, padding of the vocabulary included."""
        return sum(shard.shape.numel() for group in self._groups for name in group.names for shard in self._shards[name])

    def likenesses(self) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, empty tensor of its shape and type on the meta device) of all tensors, in the stream's order."""

        def empty_shards(name: str) -> list[Tensor]:
            return [torch.empty(shard.shape, dtype=shard.dtype, device="meta") for shard in self._shards[name]]

        return [pair for group in self._groups for pair in group.to_hf(empty_shards)]

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Lists of (Hugging Face name, full tensor), each gathered in at most bucket_bytes of memory; a larger parameter comes alone.

        The tensors of a bucket are in fresh memory: they stay valid as long as the receiver keeps them.
        """
        bucket: list[Group] = []
        size = 0
        for group in self._groups:
            needed = self._peak_bytes(group)
            if bucket and size + needed > bucket_bytes:
                yield self._gather(bucket)
                bucket, size = [], 0
            bucket.append(group)
            size += needed
        yield self._gather(bucket)

    def _peak_bytes(self, group: Group) -> int:
        """While it is gathered: the shards as they are received, and once more in Hugging Face's layout."""
        return 2 * sum(shard.padded_bytes for name in group.names for shard in self._shards[name])

    def _agree(self, mapping: Mapping, tensor_rank: int, expert_tensor_rank: int) -> dict[str, list[_Shard]]:
        """The shards of every parameter of the whole model, in tensor-parallel order."""
        mine = {}
        for name, weight in self._local.items():
            row = mapping.locate(name).row
            part = (expert_tensor_rank if row.expert else tensor_rank) if row.transform.sharded else 0
            mine[name, part] = (weight.shape, weight.dtype)
        everyone: list[dict] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)

        shards: dict[str, dict[int, _Shard]] = {}
        for rank, held in enumerate(everyone):
            for (name, part), (shape, dtype) in held.items():
                shards.setdefault(name, {}).setdefault(part, _Shard(rank, shape, dtype))
        for name, parts in shards.items():
            assert sorted(parts) == list(range(len(parts))), f"{name}: no rank holds some of its shards, found {sorted(parts)}"
        return {name: [parts[part] for part in range(len(parts))] for name, parts in shards.items()}

    def _gather(self, bucket: list[Group]) -> list[tuple[str, Tensor]]:
        by_owner: dict[int, list[tuple[str, int, _Shard]]] = {}
        for group in bucket:
            for name in group.names:
                for part, shard in enumerate(self._shards[name]):
                    by_owner.setdefault(shard.owner, []).append((name, part, shard))

        received: dict[tuple[str, int], Tensor] = {}
        for owner, sent in sorted(by_owner.items()):
            buffer = torch.empty(sum(shard.padded_bytes for _, _, shard in sent), dtype=torch.uint8, device=self._device)
            offset = 0
            for name, part, shard in sent:
                received[name, part] = buffer[offset : offset + shard.num_bytes].view(shard.dtype).view(shard.shape)
                if owner == dist.get_rank():
                    received[name, part].copy_(self._local[name].detach())
                offset += shard.padded_bytes
            if dist.get_world_size() > 1:
                dist.broadcast(buffer, src=owner)

        def shards_of(name: str) -> list[Tensor]:
            return [received[name, part] for part in range(len(self._shards[name]))]

        return [pair for group in bucket for pair in group.to_hf(shards_of)]
