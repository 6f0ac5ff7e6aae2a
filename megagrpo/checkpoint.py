"""Weights as Megatron-Core's distributed checkpoint (torch_dist), which a model of any layout can load.

A running model saves and loads its shards through megatron.core.dist_checkpointing. Conversion goes parameter by parameter through
torch.distributed.checkpoint, in which that format is written, so that no process ever holds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megagrpo.hf_mapping.names import named_weights

_METADATA = "metadata.json"  # Megatron writes it last: with it a checkpoint is complete
_MAX_FILE_BYTES = 2**30


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds a complete distributed checkpoint."""
    return (Path(folder) / _METADATA).is_file()


def save_weights(chunks: list[nn.Module], folder: str | Path) -> None:
    """Write this rank's part of the model; collective over all ranks. The folder must exist and be empty."""
    dist_checkpointing.save(_sharded(chunks), str(folder))


def load_weights(chunks: list[nn.Module], folder: str | Path) -> None:
    """Fill this rank's model chunks, whatever layout the checkpoint was saved from; collective over all ranks.

    Raises ValueError, before anything is read, where the checkpoint lacks a parameter or has one of another shape.
    """
    CheckpointReader(folder).check(box for state in _sharded(chunks).values() for part in state.values() for box in _boxes(part))
    loaded = dist_checkpointing.load(_sharded(chunks), str(folder))
    for i, chunk in enumerate(chunks):
        result = chunk.load_state_dict(loaded[f"model{i}"], strict=False)
        missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
        assert not missing, f"the checkpoint left {missing} unset"


def _sharded(chunks: list[nn.Module]) -> dict[str, dict[str, Any]]:
    """What to save or load of every chunk, without TransformerEngine's state of quantisation, which no layer spec but its own has."""
    return {
        f"model{i}": {name: part for name, part in chunk.sharded_state_dict().items() if not name.endswith("_extra_state")}
        for i, chunk in enumerate(chunks)
    }


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of the checkpoint: what one ShardedTensor stands for."""

    key: str
    offsets: torch.Size
    sizes: torch.Size
    whole: torch.Size
    data: Tensor  # of shape sizes, but for leading ones
    may_be_padded: bool = False  # the vocabulary, whose padding depends on the layout


def _boxes(part: ShardedTensor | ShardedTensorFactory) -> list[Box]:
    tensors = part.build() if isinstance(part, ShardedTensorFactory) else [part]
    return [
        Box(
            t.key,
            torch.Size(t.global_offset),
            torch.Size((1,) * t.prepend_axis_num + tuple(t.local_shape)),
            torch.Size(t.global_shape),
            t.data,
            t.allow_shape_mismatch,
        )
        for t in tensors
    ]


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """One whole Megatron parameter, and how it is stored."""

    name: str  # as in named_weights
    like: Tensor  # its shape and type, on the meta device
    part: ShardedTensor | ShardedTensorFactory

    def boxes(self, value: Tensor | None = None) -> list[Box]:
        """The parts of the checkpoint's tensors that hold the parameter's value, or without one its likeness."""
        data = self.like if value is None else value
        typed = {"dtype": data.dtype} if isinstance(self.part, ShardedTensor) else {}
        return _boxes(replace(self.part, data=data, **typed))

    def merge(self, parts: list[Tensor]) -> Tensor:
        """What `boxes` takes apart."""
        return self.part.merge_fn(parts) if isinstance(self.part, ShardedTensorFactory) else parts[0]


def stored_parameters(model: nn.Module) -> dict[str, StoredParameter]:
    """Every parameter of a GPTModel that is not split, by its name; the model may be on the meta device."""
    sharded = model.sharded_state_dict()
    local_names = {id(weight): name for name, weight in (*model.named_parameters(), *model.named_buffers())}
    return {name: StoredParameter(name, weight.detach(), sharded[local_names[id(weight)]]) for name, weight in named_weights([model])}


def write_parameters(folder: Path, parameters: list[StoredParameter], value_of: Callable[[str], Tensor]) -> None:
    """Write a checkpoint of whole parameters, each asked for when its turn comes and forgotten after; collective over all ranks.

    parameters: this rank's share of them, with the types to be stored. Extra memory: one file, of 1 GiB or one larger parameter.
    """
    writer = _FilesOfLimitedSize(folder, thread_count=1)
    dcp.save({}, storage_writer=writer, planner=_LazyPlanner(parameters, value_of))
    if dist.get_rank() == 0:
        torch.save({}, folder / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Plans the writing of parameters from their likenesses, and makes each when it is written."""

    def __init__(self, parameters: list[StoredParameter], value_of: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parameters, self._value_of = parameters, value_of
        self._where: dict[tuple[str, torch.Size], tuple[StoredParameter, int]] = {}
        self._last: tuple[str, list[Box]] | None = None  # the boxes of one parameter are written in a row

    def create_local_plan(self) -> SavePlan:
        """One item for every box."""
        items = []
        for parameter in self._parameters:
            for i, box in enumerate(parameter.boxes()):
                self._where[box.key, box.offsets] = parameter, i
                chunk, properties = ChunkStorageMetadata(box.offsets, box.sizes), TensorProperties(dtype=parameter.like.dtype)
                data = TensorWriteData(chunk, properties, box.whole)
                items.append(WriteItem(MetadataIndex(box.key, box.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of one box."""
        parameter, i = self._where[write_item.index.fqn, write_item.index.offset]
        if self._last is None or self._last[0] != parameter.name:
            self._last = None  # before the next is made
            self._last = parameter.name, parameter.boxes(self._value_of(parameter.name))
        box = self._last[1][i]
        return box.data.reshape(box.sizes).contiguous()


class _FilesOfLimitedSize(dcp.FileSystemWriter):
    """torch's writer keeps the tensors of a file until it is written: here a file is limited."""

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """Several files a rank, one after the other."""
        results = []
        for i, items in enumerate(_by_size(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(results)
        return done


def _by_size(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        num_bytes = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if batch and size + num_bytes > _MAX_FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes
    if batch:
        yield batch


class CheckpointReader:
    """The tensors of a distributed checkpoint, any part of them at a time, whatever layout wrote it.

    Raises ValueError for a folder that holds no whole checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not is_checkpoint(folder):
            raise ValueError(f"{folder} holds no complete torch_dist checkpoint: it has no {_METADATA}")
        self._reader = dcp.FileSystemReader(self.folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {key: t for key, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
        files = {self.folder / stored.relative_path for stored in metadata.storage_data.values()}
        missing = sorted(file.name for file in files if not file.is_file())
        if missing:
            raise ValueError(f"{folder}: {missing[0]} is not there, which its metadata names; fetch or write the checkpoint again")

    def check(self, boxes: Iterable[Box]) -> None:
        """Raise ValueError where the checkpoint lacks a tensor or has one of another shape."""
        for box in boxes:
            if box.key not in self._tensors:
                raise ValueError(f"{self.folder} has no tensor {box.key}, which config.json calls for")
            size = self._tensors[box.key].size
            if size != box.whole and not (box.may_be_padded and size[1:] == box.whole[1:]):
                raise ValueError(
                    f"{self.folder}: {box.key} has the shape {tuple(size)}, the model {tuple(box.whole)}: "
                    "config.json and the checkpoint do not belong together"
                )

    def typed(self, parameter: StoredParameter) -> StoredParameter:
        """The parameter with the type in which it is stored."""
        dtype = self._tensors[parameter.boxes()[0].key].properties.dtype
        return replace(parameter, like=parameter.like.to(dtype))

    def get(self, parameter: StoredParameter) -> Tensor:
        """A whole parameter. Extra memory: its largest part, as it is read."""
        return parameter.merge([self._read(box) for box in parameter.boxes()])

    def _read(self, box: Box) -> Tensor:
        stored = self._tensors[box.key]
        target = torch.empty(box.sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(box.key, stored, [ChunkStorageMetadata(box.offsets, box.sizes)])
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except (RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{self.folder}: {box.key} cannot be read ({error}); fetch or write the checkpoint again") from error
        return target.reshape(box.data.shape)


class _IntoTensor(dcp.DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that an item fills."""
        part = self._target
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is where it belongs."""
