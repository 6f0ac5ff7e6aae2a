"""What a model family says of itself: which Megatron model to build, and which of its parameters is which Hugging Face tensor.

A Hugging Face config.json -> Architecture, Mapping. The families themselves are files of families/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.hf_mapping.rope import Rope
from megagrpo.hf_mapping.transforms import Transform


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of parameter: its Megatron name, its Hugging Face names, and the layout between them.

    Names are those of Megatron's sharded_state_dict. `{layer}` and `{expert}` are global indices. Both sides have the same
    placeholders, but for stacked experts: where only the Megatron name has `{expert}`, the Hugging Face tensors hold all experts.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    expert: bool = False  # sharded over expert-parallel ranks and, inside one expert, over expert-tensor-parallel ones

    @property
    def stacked(self) -> bool:
        """Whether the Hugging Face tensors are [experts, ...], one Megatron parameter each."""
        return "{expert}" in self.megatron and "{expert}" not in self.hf[0]

    def match(self, name: str) -> dict[str, str] | None:
        """The placeholders' values where `name` is of this kind, else None."""
        return _match(self.megatron, name)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one Megatron parameter is found among the Hugging Face tensors."""

    row: Row
    hf_names: tuple[str, ...]
    expert: int | None  # which part of the stacked tensors, where they are stacked


@dataclass(frozen=True, slots=True)
class Group:
    """The Megatron parameters, one or where experts are stacked all of a layer, that make the same Hugging Face tensors."""

    place: Place  # of the first
    names: list[str]

    def to_hf(self, shards_of: Callable[[str], list[Tensor]]) -> list[tuple[str, Tensor]]:
        """(name, full tensor) of its Hugging Face tensors; shards_of gives a parameter's shards in tensor-parallel order."""
        row = self.place.row
        full = [row.transform.to_hf(shards_of(name)) for name in self.names]
        tensors = [torch.stack(experts) for experts in zip(*full, strict=True)] if row.stacked else full[0]
        return list(zip(self.place.hf_names, tensors, strict=True))


@dataclass(frozen=True, slots=True)
class Mapping:
    """The table of one model."""

    rows: tuple[Row, ...]
    tied: bool  # the head is the embedding: Hugging Face stores no lm_head
    not_trained: tuple[str, ...] = ()  # Hugging Face names, with placeholders, of tensors the model does not compute with

    def locate(self, name: str) -> Place:
        """The place of a Megatron parameter."""
        for row in self.rows:
            found = row.match(name)
            if found is not None:
                return Place(row, tuple(hf.format(**found) for hf in row.hf), int(found["expert"]) if row.stacked else None)
        raise AssertionError(f"no row for the Megatron parameter {name}")

    def groups(self, names: Iterable[str]) -> list[Group]:
        """The parameters that are stored in Hugging Face files, in model order, grouped by the tensors that they make."""
        groups: dict[tuple[str, ...], Group] = {}
        for name in sorted(names, key=_model_order):
            if self.tied and name == "output_layer.weight":
                continue  # it is the embedding
            place = self.locate(name)
            groups.setdefault(place.hf_names, Group(place, [])).names.append(name)
        return list(groups.values())

    def knows(self, hf_name: str) -> bool:
        """Whether a Hugging Face tensor belongs to this model, trained or not."""
        return self.leaves_out(hf_name) or any(_match(hf, hf_name) is not None for row in self.rows for hf in row.hf)

    def leaves_out(self, hf_name: str) -> bool:
        """Whether a Hugging Face tensor is one that may be in a file and is not exported: the model does not compute with it."""
        repeated = ("lm_head.weight",) if self.tied else ()  # some files repeat the embedding
        return any(_match(pattern, hf_name) is not None for pattern in (*repeated, *self.not_trained))


@dataclass(frozen=True, slots=True)
class Architecture:
    """The Megatron model of one Hugging Face config; mcore/model.py builds it."""

    transformer: dict[str, Any]  # fields of TransformerConfig; with multi_latent_attention, of MLATransformerConfig
    rope: Rope
    # what Megatron's own layer specs and GPTModel lack
    post_norms: bool = False  # a norm behind attention and one behind the MLP, before the residual is added
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: two functions of a Hugging Face config. Both raise ValueError for what cannot be expressed."""

    architecture: Callable[[dict[str, Any]], Architecture]
    mapping: Callable[[dict[str, Any]], Mapping]


def _match(pattern: str, name: str) -> dict[str, str] | None:
    escaped = re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    found = re.fullmatch(escaped, name)
    return found.groupdict() if found else None


def _model_order(name: str) -> tuple:
    """Embedding, then layers by number (experts too), then final norm and head: a layer's tensors are neighbours."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        expert = re.search(r"experts\.(\d+)\.", name)
        return 1, int(layer[1]), bool(expert), int(expert[1]) if expert else 0, name
    return (0, name) if name.startswith("embedding") else (2, name)
