"""Tensors of a Hugging Face folder by name, from one or many safetensors files, one at a time.

Every header is read when the folder is opened: what is missing, cut short or of an unknown type is known before any weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megagrpo.hf_mapping.table import Mapping, Place

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class FolderReader:
    """The weights of one folder. Raises ValueError, naming file and tensor, for files that are missing, cut short or of another kind."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        indexed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        files = sorted({self.folder / file for file in indexed.values()} or self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} has no .safetensors file; set a folder with safetensors weights")
        found = {name: stored for file in files for name, stored in _read_header(file, index if indexed else None)}
        for name, file in indexed.items():
            if name not in found or found[name].file.name != file:
                raise ValueError(f"{index} says that {name} is in {file}, which does not hold it")
        self._stored: dict[str, _Stored] = {name: found[name] for name in indexed or found}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._stored)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.like(name).nbytes for name in self._stored)

    def refuse_unknown(self, mapping: Mapping) -> None:
        """Raise ValueError where the folder holds tensors that the model has no place for."""
        unknown = [name for name in self._stored if not mapping.knows(name)]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{self.folder}: {self._stored[unknown[0]].file.name} holds {unknown[0]}{more}, which config.json does not call for"
            )

    def like(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the shape and type of one of the folder's."""
        if name not in self._stored:
            raise ValueError(f"{self.folder}: the weights have no tensor {name}, which config.json calls for")
        return torch.empty(self._stored[name].shape, dtype=self._stored[name].dtype, device="meta")

    def get(self, name: str) -> Tensor:
        """A whole tensor."""
        self.like(name)
        # opened anew every time: what is read of a file stays in this process's memory until it is closed
        with safe_open(self._stored[name].file, framework="pt") as file:
            return file.get_tensor(name)

    def sources(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """The Hugging Face tensors that a Megatron parameter is made of; of stacked ones, the part of its expert."""
        if place.expert is None:
            return [self.like(name) if meta else self.get(name) for name in place.hf_names]
        return [self.like(name)[place.expert] if meta else self._part(name, place.expert) for name in place.hf_names]

    def _part(self, name: str, index: int) -> Tensor:
        self.like(name)
        with safe_open(self._stored[name].file, framework="pt") as file:
            return file.get_slice(name)[index]


def _read_header(file: Path, index: Path | None) -> list[tuple[str, _Stored]]:
    if not file.is_file():
        raise ValueError(f"{index} names {file.name}, which is not there; fetch it again" if index else f"{file} is not there")
    stored = []
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                header = opened.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{file}: {name} is of type {header.get_dtype()}, which is not supported: {', '.join(_DTYPES)} are. "
                        "Dequantise the model first"
                    )
                stored.append((name, _Stored(file, tuple(header.get_shape()), _DTYPES[header.get_dtype()])))
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); fetch it again") from None
    return stored
