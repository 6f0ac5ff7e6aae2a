"""Stage 2: prompts -> groups of responses, from a vLLM engine that lives in the trainer's own processes.

Engines are blocks of `rollout.tensor_parallel_size` neighbouring ranks, each with its own share of the prompts. The engine starts with
dummy weights and refuses to generate until a weight sync has filled it. Scoring, gathering and training happen elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megagrpo.config.schema import Config
from megagrpo.hf_mapping.families.decoder import head_dim
from megagrpo.types import Prompt, Sample
from megagrpo.vllm_cpu import prepare_vllm_cpu

_GPU_SHARE_ALONE, _GPU_SHARE_BESIDE_TRAINER = 0.85, 0.4  # of the device, at most, for weights and KV cache
_HOST_SHARE = 0.25  # of the free memory of a host without GPUs, for the KV caches of all its ranks


class _State(Enum):
    ASLEEP = "asleep"
    AWAITING_WEIGHTS = "awake without the trainer's weights"
    SYNCED = "holding the trainer's weights, without a KV cache"
    READY = "ready"


class RolloutEngine:
    """This rank's part of a vLLM engine. Every method is collective over the engine's ranks.

    The cycle is wake_for_sync -> (weight sync) -> mark_synced -> wake_for_generation -> generate -> sleep. On CPU, where vLLM
    cannot sleep, the same cycle frees nothing.
    """

    def __init__(
        self, model_dir: Path, hf_config: dict[str, Any], config: Config, *, device: torch.device, stop_token_ids: list[int]
    ) -> None:
        from vllm import LLM

        rollout, size = config.rollout, config.rollout.tensor_parallel_size
        self._rollout = rollout
        self._seed = config.trainer.seed
        self._stop_token_ids = stop_token_ids
        self._sleeps = device.type == "cuda"
        fraction = rollout.logprob_fraction
        self._logprob_fraction = (0.125 if self._sleeps else 1.0) if fraction == "auto" else fraction

        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.index, self.num_engines = rank // size, world_size // size
        self.is_leader = rank % size == 0
        groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, world_size, size)]
        self._group = groups[self.index]

        if not self._sleeps:
            prepare_vllm_cpu()
        with _global_rng_kept():
            self._llm = LLM(
                model=str(model_dir),
                load_format="dummy",  # the first sync replaces every weight
                generation_config="vllm",  # sampling defaults and stop ids are ours
                dtype=config.model.dtype,
                seed=config.trainer.seed,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=size,
                enable_expert_parallel=rollout.enable_expert_parallel,
                max_model_len=config.data.max_prompt_length + rollout.max_response_length,
                max_num_seqs=rollout.max_num_seqs,
                max_num_batched_tokens=rollout.max_num_batched_tokens,
                kv_cache_memory_bytes=_kv_cache_bytes(model_dir, hf_config, config, device, self.num_engines),
                enforce_eager=rollout.enforce_eager or not self._sleeps,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        self._state = _State.READY
        self.sleep()

    def model_and_config(self) -> tuple[torch.nn.Module, Any]:
        """This rank's live vLLM model and vLLM's ModelConfig, for weight_sync."""
        return self._llm.collective_rpc(lambda worker: (worker.get_model(), worker.model_runner.model_config))[0]

    def wake_for_sync(self) -> None:
        """Take device memory for the weights again; their content is undefined until the sync."""
        assert self._state is _State.ASLEEP, f"the engine is {self._state.value}, not asleep"
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])
        self._state = _State.AWAITING_WEIGHTS

    def mark_synced(self) -> None:
        """Called by the weight sync when every weight has arrived."""
        assert self._state is _State.AWAITING_WEIGHTS, f"a weight sync ended while the engine was {self._state.value}"
        self._state = _State.SYNCED

    def wake_for_generation(self) -> None:
        """Take device memory for the KV cache and forget what older weights put into the prefix cache."""
        assert self._state is _State.SYNCED, f"the engine is {self._state.value}: sync the weights first"
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        assert self._llm.reset_prefix_cache(), "vLLM did not reset its prefix cache: requests are still running"
        self._state = _State.READY

    def sleep(self) -> None:
        """Give back the device memory of weights and KV cache."""
        if self._sleeps:
            self._llm.sleep(level=2)  # level 1 would copy to the host what the next sync replaces
        self._state = _State.ASLEEP

    def generate(
        self, prompts: list[Prompt], *, num_samples_per_prompt: int, temperature: float, step: int, purpose: str = "train"
    ) -> list[Sample]:
        """This engine's share of the step's samples (on its leader; the other ranks get an empty list).

        prompts are the whole step's, the same on every rank; groups stay whole. Every sample has its own seed, made of the run's
        seed, purpose, step, prompt and sample id, so that layouts and engines do not change what is drawn.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self._state is _State.READY, f"the engine is {self._state.value}: it cannot generate before a weight sync"
        rollout = self._rollout
        ids = [
            g * num_samples_per_prompt + i for g in range(self.index, len(prompts), self.num_engines) for i in range(num_samples_per_prompt)
        ]
        requests, params = [], []
        for sample_id in ids:
            prompt = prompts[sample_id // num_samples_per_prompt]
            requests.append({"prompt_token_ids": prompt.token_ids})
            params.append(
                SamplingParams(
                    temperature=temperature,
                    top_p=rollout.top_p if temperature else 1.0,
                    top_k=rollout.top_k if temperature else 0,
                    max_tokens=rollout.max_response_length,
                    seed=_seed(self._seed, purpose, step, prompt.id, sample_id),
                    logprobs=0 if purpose == "train" and _in_fraction(sample_id, self._logprob_fraction) else None,
                    flat_logprobs=True,
                    stop=rollout.stop or None,
                    stop_token_ids=self._stop_token_ids,
                    ignore_eos=True,  # the stop ids above are the only ones
                    detokenize=bool(rollout.stop),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
            )
        with _global_rng_kept():
            outputs = self._llm.generate(requests, params, use_tqdm=False) if requests else []

        samples = []
        for sample_id, output in zip(ids, outputs, strict=True):
            completion, prompt = output.outputs[0], prompts[sample_id // num_samples_per_prompt]
            samples.append(
                Sample(
                    id=sample_id,
                    group=sample_id // num_samples_per_prompt,
                    prompt_id=prompt.id,
                    prompt_ids=np.asarray(prompt.token_ids, np.int32),
                    response_ids=np.asarray(completion.token_ids, np.int32),
                    rollout_logprobs=None if completion.logprobs is None else np.asarray(completion.logprobs.logprobs, np.float32),
                    finish_reason=completion.finish_reason,
                )
            )
        self._assert_ranks_agree(samples)
        return samples if self.is_leader else []

    def shutdown(self) -> None:
        """End the engine. It destroys the default process group: nothing distributed may follow."""
        self._llm.llm_engine.engine_core.shutdown()

    def _assert_ranks_agree(self, samples: list[Sample]) -> None:
        digest = hashlib.sha256(b"".join(s.response_ids.tobytes() + b"|" for s in samples)).hexdigest()
        digests: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(digests, digest, group=self._group)
        assert len(set(digests)) == 1, f"the ranks of engine {self.index} sampled different tokens from the same requests"


def gather_samples(samples: list[Sample], num_expected: int) -> list[Sample]:
    """Every engine's samples on every rank, by sample id; each must be there exactly once."""
    everyone: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, samples)
    gathered = sorted((s for part in everyone for s in part), key=lambda s: s.id)
    assert [s.id for s in gathered] == list(range(num_expected)), f"expected samples 0 to {num_expected - 1} once each, got {len(gathered)}"
    return gathered


def stop_token_ids(tokenizer: Any, generation_config: dict[str, Any]) -> list[int]:
    """The tokens that end a response: the tokenizer's end-of-sequence token and those of generation_config.json."""
    declared = generation_config.get("eos_token_id")
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not ids:
        raise ValueError("the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json")
    return sorted(ids)


def _seed(*parts: int | str) -> int:
    """63 bits that depend on every part."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _in_fraction(sample_id: int, fraction: float) -> bool:
    """True for `fraction` of the ids, evenly spread and the same ones under every layout."""
    return int((sample_id + 1) * fraction) > int(sample_id * fraction)


def _kv_cache_bytes(model_dir: Path, hf: dict[str, Any], config: Config, device: torch.device, num_engines: int) -> int:
    """Memory of one rank's KV cache: what all requests of a step need at their longest, up to what the device has for it."""
    rollout = config.rollout
    if rollout.kv_cache_memory_bytes != "auto":
        return rollout.kv_cache_memory_bytes
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    kv_heads = max(1, hf["num_key_value_heads"] // rollout.tensor_parallel_size)
    bytes_per_token = 2 * hf["num_hidden_layers"] * kv_heads * head_dim(hf) * itemsize
    num_groups = -(-rollout.num_prompts_per_step // num_engines)
    num_sequences = min(rollout.max_num_seqs, num_groups * rollout.num_samples_per_prompt)
    block = 128  # tokens; vLLM's blocks are no larger, and every sequence leaves one partly empty
    wanted = num_sequences * (config.data.max_prompt_length + rollout.max_response_length + block) * bytes_per_token
    if device.type == "cpu":
        return min(wanted, int(_HOST_SHARE * psutil.virtual_memory().available) // int(os.environ["LOCAL_WORLD_SIZE"]))
    actor = config.actor
    alone = actor.param_offload and actor.grad_offload and actor.optimizer_offload
    share = _GPU_SHARE_ALONE if alone else _GPU_SHARE_BESIDE_TRAINER
    files = (*model_dir.glob("*.safetensors"), *model_dir.glob("*.distcp"))
    weights = sum(file.stat().st_size for file in files) // rollout.tensor_parallel_size
    room = int(share * torch.cuda.get_device_properties(device).total_memory) - weights
    if room <= 0:
        raise ValueError(
            f"the engine's weights ({weights / 2**30:.0f} GiB a rank) leave no room for a KV cache; raise rollout.tensor_parallel_size"
            + ("" if alone else ", or set actor.param_offload, grad_offload and optimizer_offload")
        )
    return min(wanted, room)


@contextmanager
def _global_rng_kept() -> Iterator[None]:
    """Restore the global generators afterwards: vLLM reseeds and draws from them, and Megatron's differ between ranks."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
