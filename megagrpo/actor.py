"""The policy that is trained: Megatron model, optimizer, frozen reference, and the device memory they take.

It runs stages 6 to 8 (logprobs, loss, optimizer) over micro-batches; where those come from and where the weights go is not its concern.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megagrpo.checkpoint import is_checkpoint, load_weights
from megagrpo.config.schema import Config
from megagrpo.hf_mapping.folder import load_hf_weights
from megagrpo.hf_mapping.stream import WeightStream
from megagrpo.hf_mapping.table import Mapping
from megagrpo.logprobs import vocab_parallel_logprobs
from megagrpo.loss import grpo_loss
from megagrpo.mcore.model import build_model, wrap_ddp
from megagrpo.mcore.offload import ActorMemory
from megagrpo.mcore.parallel import Parallel
from megagrpo.mcore.pipeline import forward_backward
from megagrpo.mcore.reference import ReferenceWeights
from megagrpo.optimizer import StepResult, build_optimizer, build_scheduler, optimizer_step
from megagrpo.types import MicroBatch

MicroBatchSums = dict[str, float]  # what the loss reports of one micro-batch, on the last pipeline stage


class Actor:
    """This rank's part of the policy. Every method is collective over the ranks of a model replica."""

    def __init__(
        self, hf_config: dict[str, Any], model_dir: Path, mapping: Mapping, config: Config, parallel: Parallel, *, total_updates: int
    ) -> None:
        self.config, self.parallel = config, parallel
        self._vocab_size = hf_config["vocab_size"]
        self.chunks = build_model(hf_config, config, parallel)
        if is_checkpoint(model_dir):
            load_weights(self.chunks, model_dir)
        else:
            load_hf_weights(
                self.chunks,
                model_dir,
                mapping,
                tensor=(parallel.tp_rank, parallel.tp_size),
                expert_tensor=(parallel.etp_rank, parallel.etp_size),
            )
        self.ddp = wrap_ddp(self.chunks, config)
        self.optimizer = build_optimizer(config, self.ddp)
        self._scheduler = build_scheduler(config, self.optimizer, total_updates)
        self._reference = ReferenceWeights(self.chunks) if config.algorithm.kl_coef > 0 else None
        self.stream = WeightStream(
            self.chunks, mapping, tensor_rank=parallel.tp_rank, expert_tensor_rank=parallel.etp_rank, device=parallel.device
        )
        self._memory = ActorMemory(config.actor, parallel.device)

    def reference_logprobs(self, micro_batches: list[MicroBatch]) -> list[Tensor] | None:
        """Per micro-batch the reference's log-probabilities [T] on the last stage (None off it, and where no KL term asks)."""
        if self._reference is None:
            return None
        with self._reference.swapped_in():
            return self.logprobs(micro_batches)

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[Tensor] | None:
        """Per micro-batch the current policy's log-probabilities [T] on the last stage, None off it."""

        def report(logits: Tensor, micro_batch: MicroBatch, index: int) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, _ = self._logprobs(logits, micro_batch, with_entropy=False)
            return logprobs.new_zeros(()), {"logprobs": logprobs}

        results = forward_backward(self.ddp, micro_batches, loss_function=report, parallel=self.parallel, forward_only=True)
        return [result["logprobs"] for result in results] if self.parallel.is_last_stage else None

    def update(
        self, micro_batches: list[MicroBatch], *, old_logprobs: list[Tensor] | None, ref_logprobs: list[Tensor] | None
    ) -> tuple[StepResult, list[MicroBatchSums]]:
        """One optimizer step on the micro-batches of this data-parallel rank.

        old_logprobs None means strictly on-policy: the current ones, detached. Returns the step's result and, on the last stage,
        what the loss reports of every micro-batch.
        """
        algorithm = self.config.algorithm

        def loss(logits: Tensor, micro_batch: MicroBatch, index: int) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropy = self._logprobs(logits, micro_batch, with_entropy=True)
            return grpo_loss(
                logprobs,
                entropy,
                micro_batch,
                algorithm,
                old_logprobs=old_logprobs[index] if old_logprobs else None,
                ref_logprobs=ref_logprobs[index] if ref_logprobs else None,
            )

        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = forward_backward(self.ddp, micro_batches, loss_function=loss, parallel=self.parallel, forward_only=False)
        sums = [{name: value.item() for name, value in result.items()} for result in results]
        return optimizer_step(self.optimizer, self._scheduler), sums

    def release_state(self) -> None:
        """Give back the memory of gradients and optimizer state, as far as the settings say; the weights stay for the sync."""
        self.optimizer.zero_grad()
        self._memory.release_state(self.ddp, self.optimizer)

    def release_weights(self) -> None:
        """Give back the memory of the weights, as far as the settings say."""
        self._memory.release_weights(self.ddp)

    def restore(self) -> None:
        """Take all released memory again."""
        self._memory.restore()

    def _logprobs(self, logits: Tensor, micro_batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return vocab_parallel_logprobs(
            logits,
            micro_batch.target_ids,
            tp_group=self.parallel.tp_group,
            vocab_size=self._vocab_size,
            temperature=self.config.rollout.temperature,
            with_entropy=with_entropy,
        )
