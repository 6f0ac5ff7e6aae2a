"""The actor's model: a Hugging Face config becomes the GPTModel chunks of this rank.

Parameters are left unset: hf_mapping/folder.py fills every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch.overrides import TorchFunctionMode

from megagrpo.config.schema import Config
from megagrpo.hf_mapping.families import family_of
from megagrpo.hf_mapping.rope import Rope
from megagrpo.mcore.layer_spec import block_spec, uses_transformer_engine
from megagrpo.mcore.parallel import Parallel, init_model_parallel
from megagrpo.mcore.transformer_config import transformer_config


def build_model(hf: dict[str, Any], config: Config, parallel: Parallel) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual stage), on its device, with parameters left unset.

    hf: config.json of a Hugging Face model. The vocabulary is padded to a multiple of the tensor-parallel size. Raises ValueError
    for what Megatron cannot express.
    """
    architecture = family_of(hf).architecture(hf)
    transformer = transformer_config(architecture, config, parallel)
    padded_vocab_size = -(-hf["vocab_size"] // parallel.tp_size) * parallel.tp_size
    chunks = []
    for stage in range(parallel.vpp_size):
        virtual = {"vp_stage": stage} if parallel.vpp_size > 1 else {}
        spec = block_spec(
            architecture,
            transformer,
            transformer_engine=uses_transformer_engine(config.actor, parallel.device),
            pp_rank=parallel.pp_rank,
            vp_stage=virtual.get("vp_stage"),
        )
        chunk = GPTModel(
            transformer,
            spec,
            vocab_size=padded_vocab_size,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=parallel.is_first_stage and stage == 0,
            post_process=parallel.is_last_stage and stage == parallel.vpp_size - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            position_embedding_type="rope",
            rotary_percent=architecture.rope.rotated_share,
            **virtual,
        )
        _reduce_experts_over_their_own_replicas(chunk)
        _rotate_as(architecture.rope, chunk)
        chunks.append(chunk.to(parallel.device))
    return chunks


@contextmanager
def unsplit_model(hf: dict[str, Any], *, with_memory: bool = False) -> Iterator[GPTModel]:
    """The whole model as one GPTModel, on CPU in fp32 or, without memory, on the meta device for its names and shapes.

    Needs the default process group, of any size, without Megatron's groups over it: those are made, and ended with the block.
    """
    config = Config.model_validate({"model": {"dtype": "float32"}, "trainer": {"device": "cpu"}})
    parallel = init_model_parallel(config, torch.device("cpu"))
    try:
        if with_memory:
            yield build_model(hf, config, parallel)[0]
        else:
            with torch.device("meta"), _OnMeta():
                model = build_model(hf, config, replace(parallel, device=torch.device("meta")))[0]
            yield model
    finally:
        parallel_state.destroy_model_parallel()


class _OnMeta(TorchFunctionMode):
    """Reads every device as meta, Megatron's own choices too."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs))


def wrap_ddp(chunks: list[GPTModel], config: Config) -> list[DistributedDataParallel]:
    """The chunks in Megatron's DistributedDataParallel: fp32 gradient buffers, averaged over data-parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=config.actor.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # optimizer.py skips the step instead of ending the run
    )
    return [DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


def _reduce_experts_over_their_own_replicas(chunk: GPTModel) -> None:
    """Megatron takes experts for dense weights while EP is 1, and with expert TP below TP then misses the replicas on TP ranks."""
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # by which DDP and optimizer know an expert's weight


def _rotate_as(rope: Rope, chunk: GPTModel) -> None:
    """Give the rotary embeddings the family's frequencies, whatever Megatron would have made of its own arguments."""
    for module in chunk.modules():
        if isinstance(module, RotaryEmbedding):
            assert module.inv_freq.shape == rope.inverse_frequencies.shape, "the family rotates another share of the head than Megatron"
            module.inv_freq = rope.inverse_frequencies.to(module.inv_freq.device)
