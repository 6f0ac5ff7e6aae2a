"""A Hugging Face folder written tensor by tensor: never more than one of them in memory, and visible under its name only when whole.

Planned tensors -> files of limited size, each with its header first, an index over them, and the small files of the source model.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.hf_mapping.reader import INDEX

MAX_FILE_BYTES = 5 * 10**9
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".distcp")
_CHECKPOINT_FILES = (INDEX, "pytorch_model.bin.index.json", "metadata.json", "common.pt", ".metadata")


def plan_files(tensors: Iterable[Tensor], *, max_file_bytes: int = MAX_FILE_BYTES) -> list[slice]:
    """Which neighbouring tensors (of any device, meta too) share a file; a larger tensor has one to itself."""
    files, first, size, count = [], 0, 0, 0
    for count, tensor in enumerate(tensors, 1):
        if size and size + tensor.nbytes > max_file_bytes:
            files.append(slice(first, count - 1))
            first, size = count - 1, 0
        size += tensor.nbytes
    return [*files, slice(first, count)]


def write_file(path: Path, planned: list[tuple[str, Tensor]], tensors: Iterable[Tensor]) -> None:
    """One safetensors file: its header from the names and likenesses planned, then the tensors in their order, as they come.

    Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, like in planned:
        header[name] = {"dtype": _CODES[like.dtype], "shape": list(like.shape), "data_offsets": [offset, offset + like.nbytes]}
        offset += like.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, like), tensor in zip(planned, tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), f"{name} is not as it was planned"
            file.write(_bytes(tensor))


def file_names(count: int) -> list[str]:
    """The names Hugging Face expects, which tell how many files there are."""
    return ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, planned: list[tuple[str, Tensor]], files: list[slice]) -> None:
    """The index that says which file holds which tensor, where there are several."""
    if len(files) == 1:
        return
    weight_map = {name: file for file, part in zip(file_names(len(files)), files, strict=True) for name, _ in planned[part]}
    index = {"metadata": {"total_size": sum(like.nbytes for _, like in planned)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def copy_small_files(source: str | Path, folder: Path) -> None:
    """Configuration, tokenizer, chat template, generation config and whatever else lies in the folder, weights excepted."""
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name not in _CHECKPOINT_FILES:
            shutil.copy(file, folder / file.name)


@contextmanager
def whole_or_nothing(out: str | Path, *, owner: bool = True) -> Iterator[Path]:
    """A folder beside `out` to write into, which takes its name, and the place of an earlier one, when the block ends well.

    When it does not, what was written is removed. Only the owner, one of all ranks, makes, renames and removes folders; the caller
    sees to it that the others write only between its start and its end.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    if owner:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        if owner:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if owner:
        replaced = out.with_name(out.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if out.exists():
            os.replace(out, replaced)
        os.replace(partial, out)
        shutil.rmtree(replaced, ignore_errors=True)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
