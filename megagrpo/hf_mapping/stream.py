"""Megatron shards on many ranks -> full Hugging Face tensors on every rank, bucket by bucket.

Every rank calls it together and receives the same names in the same order, whatever the layout. Who holds which shard is
agreed on once; a shard is then broadcast by the lowest rank that holds it, all shards of one rank and bucket in one message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.hf_mapping.names import named_weights
from megagrpo.hf_mapping.table import Mapping, Place

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


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of the whole model with its shards in tensor-parallel order."""

    name: str
    shards: list[_Shard]


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters, one or where experts are stacked all of a layer, that make the same Hugging Face tensors."""

    place: Place
    parameters: list[_Parameter]

    @property
    def peak_bytes(self) -> int:
        """While it is gathered: the shards as they are received, and once more in Hugging Face's layout."""
        return 2 * sum(shard.padded_bytes for parameter in self.parameters for shard in parameter.shards)


class WeightStream:
    """The weights of a distributed Megatron model as Hugging Face tensors.

    chunks: this rank's GPTModel chunks, without wrappers. tensor_rank and expert_tensor_rank: this rank's place among the ranks
    that share a dense layer and an expert. Creating one is collective over all ranks, and so is iterating it.
    """

    def __init__(
        self, chunks: list[nn.Module], mapping: Mapping, *, tensor_rank: int, expert_tensor_rank: int, device: torch.device
    ) -> None:
        self._mapping = mapping
        self._device = device
        self._local = {name: weight for name, weight in named_weights(chunks) if not self._repeats_embedding(name)}
        self._groups = self._agree(tensor_rank, expert_tensor_rank)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, padding of the vocabulary included."""
        return sum(shard.shape.numel() for group in self._groups for parameter in group.parameters for shard in parameter.shards)

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Lists of (Hugging Face name, full tensor), each gathered in at most bucket_bytes of memory; a larger parameter comes alone.

        The tensors of a bucket are in fresh memory: they stay valid as long as the receiver keeps them.
        """
        bucket: list[_Group] = []
        size = 0
        for group in self._groups:
            if bucket and size + group.peak_bytes > bucket_bytes:
                yield self._gather(bucket)
                bucket, size = [], 0
            bucket.append(group)
            size += group.peak_bytes
        yield self._gather(bucket)

    def _repeats_embedding(self, name: str) -> bool:
        return self._mapping.tied and name == "output_layer.weight"

    def _agree(self, tensor_rank: int, expert_tensor_rank: int) -> list[_Group]:
        mine = {}
        for name, weight in self._local.items():
            row = self._mapping.locate(name).row
            part = (expert_tensor_rank if row.expert else tensor_rank) if row.transform.sharded else 0
            mine[name, part] = (weight.shape, weight.dtype)
        everyone: list[dict] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)

        shards: dict[str, dict[int, _Shard]] = {}
        for rank, held in enumerate(everyone):
            for (name, part), (shape, dtype) in held.items():
                shards.setdefault(name, {}).setdefault(part, _Shard(rank, shape, dtype))
        groups: dict[tuple[str, ...], _Group] = {}
        for name in sorted(shards, key=_model_order):
            parts, place = shards[name], self._mapping.locate(name)
            assert sorted(parts) == list(range(len(parts))), f"{name}: no rank holds some of its shards, found {sorted(parts)}"
            group = groups.setdefault(place.hf_names, _Group(place, []))
            group.parameters.append(_Parameter(name, [parts[part] for part in range(len(parts))]))
        return list(groups.values())

    def _gather(self, bucket: list[_Group]) -> list[tuple[str, Tensor]]:
        by_owner: dict[int, list[tuple[str, int, _Shard]]] = {}
        for group in bucket:
            for parameter in group.parameters:
                for part, shard in enumerate(parameter.shards):
                    by_owner.setdefault(shard.owner, []).append((parameter.name, part, shard))

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

        tensors = []
        for group in bucket:
            row = group.place.row
            full = [row.transform.to_hf([received[p.name, part] for part in range(len(p.shards))]) for p in group.parameters]
            joined = [torch.stack(experts) for experts in zip(*full, strict=True)] if row.stacked else full[0]
            tensors.extend(zip(group.place.hf_names, joined, strict=True))
        return tensors


def _model_order(name: str) -> tuple:
    """Embedding, then layers by number (experts too), then final norm and head: a layer's tensors are neighbours."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        expert = re.search(r"experts\.(\d+)\.", name)
        return 1, int(layer[1]), bool(expert), int(expert[1]) if expert else 0, name
    return (0, name) if name.startswith("embedding") else (2, name)
