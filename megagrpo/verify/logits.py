"""Whether Megatron computes what transformers computes: the logits of both, in fp32 on CPU, for prompts of the user's.

Hugging Face folder and distributed checkpoint -> differences. Holds the model twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.checkpoint import load_weights
from megagrpo.hf_mapping.folder import read_config
from megagrpo.mcore.model import unsplit_model


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """The logits of one prompt, all positions."""

    text: str
    num_tokens: int
    max_difference: float
    same_next_token: bool


@torch.no_grad()
def compare_logits(hf_folder: str | Path, folder: str | Path, prompts: list[str]) -> list[PromptComparison]:
    """Logits of both folders on the same tokens. Needs the default process group; every rank computes everything."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_folder, local_files_only=True)
    reference = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, local_files_only=True)
    hf, compared = read_config(folder), []
    with unsplit_model(hf, with_memory=True) as model:
        load_weights([model], folder)
        for text in prompts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            expected = reference(ids).logits[0]
            found = model(ids, torch.arange(ids.shape[1])[None], None)[0, :, : hf["vocab_size"]]
            same = bool(expected[-1].argmax() == found[-1].argmax())
            compared.append(PromptComparison(text, ids.shape[1], (expected - found).abs().max().item(), same))
    return compared
