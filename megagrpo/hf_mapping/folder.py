"""Hugging Face model folders: weights read shard by shard into a Megatron model, or written from the weight stream.

Reading touches one tensor at a time; writing keeps one output file in memory and makes the folder visible when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megagrpo.hf_mapping.names import named_weights
from megagrpo.hf_mapping.table import Mapping

_INDEX = "model.safetensors.index.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no Hugging Face model folder: it has no config.json. Set model.path to a folder that has one")
    config = json.loads(path.read_text())
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))  # older configs leave it out where they are equal
    return config


def load_weights(
    chunks: list[nn.Module], folder: str | Path, mapping: Mapping, *, tensor: tuple[int, int], expert_tensor: tuple[int, int]
) -> None:
    """Fill this rank's model chunks from a Hugging Face folder.

    tensor and expert_tensor are (rank, size) of tensor parallelism in dense layers and in experts. Raises ValueError where the
    folder lacks a tensor or its shape does not fit.
    """
    reader = _Reader(Path(folder))
    with torch.no_grad():
        for name, weight in named_weights(chunks):
            place = mapping.locate(name)
            rank, size = expert_tensor if place.row.expert else tensor
            shard = place.row.transform.to_megatron([reader.get(hf, place.expert) for hf in place.hf_names], rank=rank, size=size)
            if shard.shape != weight.shape:
                raise ValueError(
                    f"{folder}: {' + '.join(place.hf_names)} gives {name} the shape {tuple(shard.shape)}, the model has "
                    f"{tuple(weight.shape)}: config.json and the weights do not belong together"
                )
            weight.copy_(shard)


class _Reader:
    """Tensors of a folder by name, from one or many safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        if (folder / _INDEX).is_file():
            weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
            self._where = {name: folder / file for name, file in weight_map.items()}
        else:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise ValueError(f"{folder} has no .safetensors file. Set model.path to a folder with safetensors weights")
            self._where = {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a dict)

    def get(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor, or the part of one expert where the tensor holds all."""
        if name not in self._where:
            raise ValueError(f"{self._folder}: the weights have no tensor {name}, which config.json calls for")
        file = self._open(self._where[name])
        return file.get_tensor(name) if expert is None else file.get_slice(name)[expert]

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]


def write_folder(
    out: str | Path, buckets: Iterable[list[tuple[str, Tensor]]], *, source: str | Path, writer: bool, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write the weight stream as a Hugging Face folder; all ranks call it, the one with `writer` set writes.

    config.json, tokenizer, chat template and generation config are those of `source`. The folder appears under its name only
    when complete; an earlier one of that name is replaced.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        path = partial / f"part-{len(files)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        files.append((path, list(pending)))
        pending.clear()

    if writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    for bucket in buckets:
        for name, tensor in bucket if writer else ():
            if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_file_bytes:
                flush()
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
            total += tensor.nbytes
    if not writer:
        return
    flush()
    _name_files(partial, files, total)
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".gguf")) and file.name != _INDEX:
            shutil.copy(file, partial / file.name)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)


def _name_files(folder: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    """Give the files the names Hugging Face expects, which count them, and write the index where there are several."""
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, (path, names) in enumerate(files, 1):
        final = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
