"""Which Megatron parameter is which Hugging Face tensor: one table per model family, one row per kind of parameter.

Rows are keyed on the names of Megatron's sharded_state_dict. `{layer}` and `{expert}` are global indices; both sides of a row
have the same placeholders. To add a family, write its function and list it in FAMILIES.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megagrpo.config.keys import did_you_mean
from megagrpo.hf_mapping.transforms import GatedMLP, QueryKeyValue, Replicated, Sliced, Transform, Vocabulary


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of parameter: its Megatron name, its Hugging Face names, and the layout between them."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    expert: bool = False  # sharded over expert-parallel ranks and, inside one expert, over expert-tensor-parallel ones

    def match(self, name: str) -> dict[str, str] | None:
        """The placeholders' values where `name` is of this kind, else None."""
        pattern = re.escape(self.megatron).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        found = re.fullmatch(pattern, name)
        return found.groupdict() if found else None


@dataclass(frozen=True, slots=True)
class Mapping:
    """The table of one model."""

    rows: tuple[Row, ...]
    tied: bool  # the head is the embedding: Hugging Face stores no lm_head

    def locate(self, name: str) -> tuple[Row, list[str]]:
        """The row of a Megatron parameter and the names of its Hugging Face tensors."""
        for row in self.rows:
            placeholders = row.match(name)
            if placeholders is not None:
                return row, [hf.format(**placeholders) for hf in row.hf]
        raise AssertionError(f"no row for the Megatron parameter {name}")


def head_dim(hf: dict[str, Any]) -> int:
    """Size of one attention head of a Hugging Face config."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def _decoder(hf: dict[str, Any], *layer_rows: Row) -> Mapping:
    """A decoder of pre-norm layers between an embedding and a final norm, as Llama lays it out."""
    attention = QueryKeyValue(hf["num_attention_heads"], hf["num_key_value_heads"], head_dim(hf))
    vocabulary = Vocabulary(hf["vocab_size"])
    megatron, layer = "decoder.layers.{layer}", "model.layers.{layer}"
    qkv = tuple(f"{layer}.self_attn.{p}_proj" for p in "qkv")
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
        Row(f"{megatron}.self_attention.linear_qkv.layer_norm_weight", (f"{layer}.input_layernorm.weight",), Replicated()),
        Row(f"{megatron}.self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in qkv), attention),
        Row(f"{megatron}.self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in qkv), attention),
        Row(f"{megatron}.self_attention.q_layernorm.weight", (f"{layer}.self_attn.q_norm.weight",), Replicated()),
        Row(f"{megatron}.self_attention.k_layernorm.weight", (f"{layer}.self_attn.k_norm.weight",), Replicated()),
        Row(f"{megatron}.self_attention.linear_proj.weight", (f"{layer}.self_attn.o_proj.weight",), Sliced(axis=1)),
        *layer_rows,
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Row("output_layer.weight", ("model.embed_tokens.weight" if hf.get("tie_word_embeddings") else "lm_head.weight",), vocabulary),
    )
    return Mapping(rows, tied=bool(hf.get("tie_word_embeddings")))


def llama(hf: dict[str, Any]) -> Mapping:
    """Llama 2 and 3, and dense models of the same layout: Qwen2 (QKV bias), Qwen3 (QK norm)."""
    megatron, layer = "decoder.layers.{layer}.mlp", "model.layers.{layer}"
    return _decoder(
        hf,
        Row(f"{megatron}.linear_fc1.layer_norm_weight", (f"{layer}.post_attention_layernorm.weight",), Replicated()),
        Row(f"{megatron}.linear_fc1.weight", (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"), GatedMLP()),
        Row(f"{megatron}.linear_fc2.weight", (f"{layer}.mlp.down_proj.weight",), Sliced(axis=1)),
    )


def qwen3_moe(hf: dict[str, Any]) -> Mapping:
    """Qwen3 mixture of experts: every layer has a router and experts."""
    megatron, layer = "decoder.layers.{layer}", "model.layers.{layer}"
    expert = f"{layer}.mlp.experts.{{expert}}"
    return _decoder(
        hf,
        Row(f"{megatron}.pre_mlp_layernorm.weight", (f"{layer}.post_attention_layernorm.weight",), Replicated()),
        Row(f"{megatron}.mlp.router.weight", (f"{layer}.mlp.gate.weight",), Replicated()),
        Row(
            f"{megatron}.mlp.experts.{{expert}}.linear_fc1.weight",
            (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"),
            GatedMLP(),
            expert=True,
        ),
        Row(f"{megatron}.mlp.experts.{{expert}}.linear_fc2.weight", (f"{expert}.down_proj.weight",), Sliced(axis=1), expert=True),
    )


FAMILIES: dict[str, Callable[[dict[str, Any]], Mapping]] = {
    "llama": llama,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_moe": qwen3_moe,
}


def mapping_for(hf: dict[str, Any]) -> Mapping:
    """The table of the model that a Hugging Face config.json describes, by its exact model_type."""
    model_type = hf.get("model_type", "")
    if model_type not in FAMILIES:
        hint = did_you_mean(model_type, candidates=tuple(FAMILIES))
        raise ValueError(f"model_type {model_type!r} is not supported{hint}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type](hf)
