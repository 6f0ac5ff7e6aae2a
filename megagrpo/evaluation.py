"""Held-out accuracy: the validation prompts through the engine and the reward functions that training uses.

Accuracy is the first function of reward.functions, unweighted. Trains nothing.
"""

from __future__ import annotations

import numpy as np

from megagrpo.scoring import score_and_gather
from megagrpo.session import Session


def evaluate(session: Session, step: int) -> dict[str, float]:
    """`val-core/<dataset>/acc/mean@k` and, for k > 1, `pass@k`, with the weights the engine holds. Collective over all ranks."""
    evaluation, prompts = session.config.evaluation, session.val_prompts
    k = evaluation.num_samples_per_prompt
    samples = session.engine.generate(prompts, num_samples_per_prompt=k, temperature=evaluation.temperature, step=step, purpose="val")
    samples, _ = score_and_gather(
        samples, prompts, scorer=session.scorer, tokenizer=session.tokenizer, config=session.config, num_expected=len(prompts) * k
    )
    # samples come by id: the k of the first prompt, then those of the next
    scores = np.array([next(iter(sample.reward_parts.values())) for sample in samples]).reshape(-1, k)
    prefix = f"val-core/{session.val_name}/acc"
    metrics = {f"{prefix}/mean@{k}": float(scores.mean())}
    if k > 1:
        metrics[f"{prefix}/pass@{k}"] = float(scores.max(axis=1).mean())
    return metrics
