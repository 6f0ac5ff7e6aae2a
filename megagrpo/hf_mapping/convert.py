"""Hugging Face folder <-> Megatron's distributed checkpoint, parameter by parameter, bit for bit; and whether two such folders are equal.

The Megatron folder is a model folder too: config.json, tokenizer and the rest travel along, and model.path may name it. All functions
are collective over the ranks of the default process group, which share the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.checkpoint import CheckpointReader, StoredParameter, stored_parameters, write_parameters
from megagrpo.hf_mapping.families import mapping_for
from megagrpo.hf_mapping.folder import read_config, refuse_other_shape
from megagrpo.hf_mapping.reader import FolderReader
from megagrpo.hf_mapping.table import Group, Mapping
from megagrpo.hf_mapping.writer import MAX_FILE_BYTES, copy_small_files, file_names, plan_files, whole_or_nothing, write_file, write_index
from megagrpo.mcore.model import unsplit_model

Progress = Callable[[int, int], None]  # bytes done since the last call, bytes that this rank will do in all


def hf_to_megatron(hf_folder: str | Path, out: str | Path, progress: Progress) -> None:
    """Write a Hugging Face model as a distributed checkpoint.

    Raises ValueError, before anything is written, where files are not whole or do not belong to config.json.
    """
    config = read_config(hf_folder)
    mapping, reader = mapping_for(config), FolderReader(hf_folder)
    reader.refuse_unknown(mapping)
    parameters = [_with_type_of_files(p, mapping, reader) for p in _parameters(config, mapping).values()]
    share = parameters[dist.get_rank() :: dist.get_world_size()]
    total = sum(parameter.like.nbytes for parameter in share)

    def value_of(name: str) -> Tensor:
        place = mapping.locate(name)
        value = place.row.transform.to_megatron(reader.sources(place), rank=0, size=1)
        progress(value.nbytes, total)
        return value

    with _shared_folder(out) as partial:
        write_parameters(partial, share, value_of)
        if dist.get_rank() == 0:
            copy_small_files(hf_folder, partial)


def megatron_to_hf(folder: str | Path, out: str | Path, progress: Progress, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a distributed checkpoint as a Hugging Face model, in files of at most max_file_bytes.

    Raises ValueError, before anything is written, where the checkpoint is not whole or does not belong to config.json.
    """
    source = _MegatronSource(folder)
    planned = source.likenesses()
    files = plan_files((like for _, like in planned), max_file_bytes=max_file_bytes)
    mine = list(zip(file_names(len(files)), files, strict=True))[dist.get_rank() :: dist.get_world_size()]
    total = sum(like.nbytes for _, part in mine for _, like in planned[part])

    def counted(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            yield tensor
            progress(tensor.nbytes, total)

    with _shared_folder(out) as partial:
        for file, part in mine:
            write_file(partial / file, planned[part], counted(source.tensors(part)))
        if dist.get_rank() == 0:
            write_index(partial, planned, files)
            copy_small_files(folder, partial)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of two folders. shape, dtype and checksum are (Hugging Face's, Megatron's), None where it is missing."""

    name: str
    shape: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtype: tuple[str | None, str | None]
    checksum: tuple[str | None, str | None]
    max_difference: float | None  # None where shapes differ

    @property
    def equal(self) -> bool:
        """Bit for bit."""
        return all(a == b and a is not None for a, b in (self.shape, self.dtype, self.checksum))


def compare(hf_folder: str | Path, folder: str | Path, progress: Progress) -> list[Comparison]:
    """Compare every tensor of a Hugging Face folder with what a distributed checkpoint would be exported as; on all ranks, by name."""
    reader, source = FolderReader(hf_folder), _MegatronSource(folder)
    planned = source.likenesses()
    owners = range(dist.get_rank(), len(planned), dist.get_world_size())
    total = sum(planned[i][1].nbytes for i in owners)
    found = []
    for i in owners:
        name, like = planned[i]
        (megatron,) = source.tensors(slice(i, i + 1))
        found.append(_compared(name, reader.get(name) if name in reader.names else None, megatron))
        progress(like.nbytes, total)
    everyone: list[list[Comparison]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    made = {name for name, _ in planned}
    missing = [name for name in reader.names if name not in made and not source.mapping.leaves_out(name)]
    comparisons = [c for part in everyone for c in part] + [_compared(name, reader.get(name), None) for name in missing]
    return sorted(comparisons, key=lambda comparison: comparison.name)


class _MegatronSource:
    """A distributed checkpoint as the Hugging Face tensors it stands for, in model order."""

    def __init__(self, folder: str | Path) -> None:
        config = read_config(folder)
        self.mapping = mapping_for(config)
        self._reader = CheckpointReader(folder)
        parameters = _parameters(config, self.mapping)
        self._reader.check(box for parameter in parameters.values() for box in parameter.boxes())
        self._parameters = {name: self._reader.typed(parameter) for name, parameter in parameters.items()}
        groups = self.mapping.groups(parameters)
        self._tensors = [(group, i) for group in groups for i in range(len(group.place.hf_names))]
        self._groups = groups

    def likenesses(self) -> list[tuple[str, Tensor]]:
        """(name, empty tensor on the meta device) of all tensors."""
        return [pair for group in self._groups for pair in group.to_hf(lambda name: [self._parameters[name].like])]

    def tensors(self, part: slice) -> Iterator[Tensor]:
        """Some of the tensors, read when their turn comes; those that share a parameter in a row are read once."""
        read: tuple[Group, list[tuple[str, Tensor]]] | None = None
        for group, i in self._tensors[part]:
            if read is None or read[0] is not group:
                read = None  # before the next is read
                read = group, group.to_hf(lambda name: [self._reader.get(self._parameters[name])])
            yield read[1][i][1]


def _parameters(config: dict[str, Any], mapping: Mapping) -> dict[str, StoredParameter]:
    """All parameters of the model that are stored: a tied head is not."""
    with unsplit_model(config) as model:
        parameters = stored_parameters(model)
    return {name: parameters[name] for group in mapping.groups(parameters) for name in group.names}


def _with_type_of_files(parameter: StoredParameter, mapping: Mapping, reader: FolderReader) -> StoredParameter:
    place = mapping.locate(parameter.name)
    sources = reader.sources(place, meta=True)
    if len({source.dtype for source in sources}) > 1:
        types = ", ".join(f"{name} {source.dtype}" for name, source in zip(place.hf_names, sources, strict=True))
        raise ValueError(f"{reader.folder}: tensors that Megatron keeps in one differ in type: {types}")
    given = place.row.transform.to_megatron(sources, rank=0, size=1)
    refuse_other_shape(reader.folder, place.hf_names, parameter.name, given, parameter.like)
    return replace(parameter, like=given)


def _compared(name: str, hf: Tensor | None, megatron: Tensor | None) -> Comparison:
    difference = None
    if hf is not None and megatron is not None and hf.shape == megatron.shape:
        difference = (hf.double() - megatron.double()).abs().max().item() if hf.numel() else 0.0
    both = (hf, megatron)
    return Comparison(
        name,
        tuple(None if t is None else tuple(t.shape) for t in both),
        tuple(None if t is None else str(t.dtype).removeprefix("torch.") for t in both),
        tuple(None if t is None else _checksum(t) for t in both),
        difference,
    )


def _checksum(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy()):08x}"


@contextmanager
def _shared_folder(out: str | Path) -> Iterator[Path]:
    """The folder that all ranks write into, which appears when all have written."""
    with whole_or_nothing(out, owner=dist.get_rank() == 0) as partial:
        dist.barrier()
        yield partial
        dist.barrier()
    dist.barrier()
