"""What most families share: pre-norm decoder layers of grouped-query attention and a gated MLP or experts, as Llama named them.

A Hugging Face config -> fields of Megatron's TransformerConfig, and rows of a mapping table.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import silu

from megagrpo.hf_mapping.table import Mapping, Row
from megagrpo.hf_mapping.transforms import GatedMLP, QueryKeyValue, Replicated, Sliced, Vocabulary

MEGATRON, HF = "decoder.layers.{layer}", "model.layers.{layer}"


def head_dim(hf: dict[str, Any]) -> int:
    """Size of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def decoder_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Sizes, RMSNorm and a gated MLP. Raises ValueError for biases and activations that Llama's layout has no place for."""
    name = hf["model_type"]
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{name} with hidden_act={hf['hidden_act']} is not supported: only silu is")
    if hf.get("mlp_bias") or hf.get("attention_bias"):
        raise ValueError(f"{name} with attention_bias or mlp_bias is not supported")
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "activation_func": silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def expert_fields(hf: dict[str, Any], *, num_experts: int, ffn_hidden_size: int, renormalise: bool) -> dict[str, Any]:
    """A softmax router over experts; renormalise: the weights of the chosen ones sum to 1. No auxiliary loss."""
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": ffn_hidden_size,
        "moe_router_topk": hf["num_experts_per_tok"],
        # softmax over the chosen experts equals softmax over all, renormalised
        "moe_router_pre_softmax": not renormalise,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def window_fields(hf: dict[str, Any], windowed: list[bool]) -> dict[str, Any]:
    """A sliding window of hf["sliding_window"] tokens, the present one included, in the layers that are said to have one."""
    if not any(windowed):
        return {}
    return {"window_size": (hf["sliding_window"] - 1, 0), "window_attn_skip_freq": [int(here) for here in windowed]}


def declared_windows(hf: dict[str, Any]) -> list[bool]:
    """Which layers of a Qwen config have a sliding window."""
    num_layers = hf["num_hidden_layers"]
    if not hf.get("use_sliding_window"):
        return [False] * num_layers
    types = hf.get("layer_types")
    return [t == "sliding_attention" for t in types] if types else [i >= hf["max_window_layers"] for i in range(num_layers)]


def decoder_mapping(hf: dict[str, Any], *layer_rows: Row) -> Mapping:
    """The embedding, the given rows of the layers, the final norm and the head."""
    tied = bool(hf.get("tie_word_embeddings"))
    vocabulary = Vocabulary(hf["vocab_size"])
    rows = (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
        *layer_rows,
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Row("output_layer.weight", ("model.embed_tokens.weight" if tied else "lm_head.weight",), vocabulary),
    )
    return Mapping(rows, tied, not_trained=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",))  # in old Llama files


def attention_rows(hf: dict[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False) -> tuple[Row, ...]:
    """Grouped-query attention and the norm before it."""
    transform = QueryKeyValue(hf["num_attention_heads"], hf["num_key_value_heads"], head_dim(hf))
    qkv = tuple(f"{HF}.self_attn.{p}_proj" for p in "qkv")
    rows = [
        Row(f"{MEGATRON}.self_attention.linear_qkv.layer_norm_weight", (f"{HF}.input_layernorm.weight",), Replicated()),
        Row(f"{MEGATRON}.self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in qkv), transform),
        Row(f"{MEGATRON}.self_attention.linear_proj.weight", (f"{HF}.self_attn.o_proj.weight",), Sliced(axis=1)),
    ]
    if qkv_bias:
        rows.append(Row(f"{MEGATRON}.self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in qkv), transform))
    if qk_norm:
        for p in "qk":
            rows.append(Row(f"{MEGATRON}.self_attention.{p}_layernorm.weight", (f"{HF}.self_attn.{p}_norm.weight",), Replicated()))
    return tuple(rows)


def mlp_rows() -> tuple[Row, ...]:
    """A dense gated MLP and the norm before it."""
    return (
        Row(f"{MEGATRON}.mlp.linear_fc1.layer_norm_weight", (f"{HF}.post_attention_layernorm.weight",), Replicated()),
        Row(f"{MEGATRON}.mlp.linear_fc1.weight", (f"{HF}.mlp.gate_proj.weight", f"{HF}.mlp.up_proj.weight"), GatedMLP()),
        Row(f"{MEGATRON}.mlp.linear_fc2.weight", (f"{HF}.mlp.down_proj.weight",), Sliced(axis=1)),
    )


def expert_rows(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """A router, its experts and the norm before them; block and projections as the family calls them."""
    megatron, expert = f"{MEGATRON}.mlp.experts.{{expert}}", f"{HF}.{block}.experts.{{expert}}"
    return (
        Row(f"{MEGATRON}.pre_mlp_layernorm.weight", (f"{HF}.post_attention_layernorm.weight",), Replicated()),
        Row(f"{MEGATRON}.mlp.router.weight", (f"{HF}.{block}.gate.weight",), Replicated()),
        Row(f"{megatron}.linear_fc1.weight", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), GatedMLP(), expert=True),
        Row(f"{megatron}.linear_fc2.weight", (f"{expert}.{down}.weight",), Sliced(axis=1), expert=True),
    )


def shared_expert_rows(name: str) -> tuple[Row, ...]:
    """An expert that sees every token."""
    megatron, hf = f"{MEGATRON}.mlp.shared_experts", f"{HF}.mlp.{name}"
    return (
        Row(f"{megatron}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), GatedMLP()),
        Row(f"{megatron}.linear_fc2.weight", (f"{hf}.down_proj.weight",), Sliced(axis=1)),
    )
