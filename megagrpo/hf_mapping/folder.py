"""Hugging Face model folders: read tensor by tensor into a Megatron model, or written from the weight stream of one."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megagrpo.hf_mapping.names import named_weights
from megagrpo.hf_mapping.reader import FolderReader
from megagrpo.hf_mapping.stream import WeightStream
from megagrpo.hf_mapping.table import Mapping
from megagrpo.hf_mapping.writer import copy_small_files, file_names, plan_files, whole_or_nothing, write_file, write_index


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json. Set a folder that has one")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))  # older configs leave it out where they are equal
    return config


@torch.no_grad()
def load_hf_weights(
    chunks: list[nn.Module], folder: str | Path, mapping: Mapping, *, tensor: tuple[int, int], expert_tensor: tuple[int, int]
) -> None:
    """Fill this rank's model chunks from a Hugging Face folder.

    tensor and expert_tensor are (rank, size) of tensor parallelism in dense layers and in experts. Raises ValueError, before
    anything is read, where the folder lacks a tensor, has one that the model has no place for, or one of another shape.
    """
    reader = FolderReader(folder)
    reader.refuse_unknown(mapping)
    for meta in (True, False):
        for name, weight in named_weights(chunks):
            place = mapping.locate(name)
            rank, size = expert_tensor if place.row.expert else tensor
            shard = place.row.transform.to_megatron(reader.sources(place, meta=meta), rank=rank, size=size)
            if meta:
                refuse_other_shape(folder, place.hf_names, name, shard, weight)
            else:
                weight.copy_(shard)


def refuse_other_shape(folder: str | Path, hf_names: tuple[str, ...], name: str, given: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise ValueError where what a folder gives for a Megatron parameter has another shape than the model."""
    if given.shape != wanted.shape:
        raise ValueError(
            f"{folder}: {' + '.join(hf_names)} gives {name} the shape {tuple(given.shape)}, the model has "
            f"{tuple(wanted.shape)}: config.json and the weights do not belong together"
        )


def write_folder(out: str | Path, stream: WeightStream, *, source: str | Path, writer: bool, bucket_bytes: int) -> None:
    """Write the weights of a distributed model as a Hugging Face folder; all ranks call it, the one with `writer` set writes.

    config.json, tokenizer, chat template and generation config are those of `source`. The folder appears under its name only
    when complete; an earlier one of that name is replaced.
    """
    tensors = (pair for bucket in stream.buckets(bucket_bytes) for pair in bucket)
    if not writer:
        for _ in tensors:
            pass
        return
    planned = stream.likenesses()
    files = plan_files(like for _, like in planned)
    with whole_or_nothing(out) as partial:
        for file, part in zip(file_names(len(files)), files, strict=True):
            write_file(partial / file, planned[part], (tensor for _, tensor in islice(tensors, part.stop - part.start)))
        write_index(partial, planned, files)
        copy_small_files(source, partial)
