"""What Megatron-Core needs in order to run without CUDA: stand-ins for torch.cuda, `device="cuda"` read as CPU, and gloo's gaps filled.

Megatron's arithmetic is untouched. On a machine with CUDA none of this is called.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    """Stands in for CUDA streams and their events: work on CPU is done when its call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, *args: object) -> None:
        """Nothing is pending."""

    synchronize = wait_stream

    def record_event(self, *args: object) -> _Stream:
        """The event of a moment that has passed."""
        return self


class _CudaMeansCpu(TorchFunctionMode):
    """Reads the device "cuda" as CPU, and names CPU tensor types as Megatron's gradient buckets expect them."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return "torch.cuda." + func(*args).split(".")[-1]
        if func is Tensor.to:
            args = tuple(_CPU if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


@functools.cache
def prepare_cpu() -> None:
    """Make Megatron-Core run on CPU with gloo in this process; further calls do nothing."""
    _replace_cuda_calls()
    _fill_gaps_of_gloo()
    _CudaMeansCpu().__enter__()
    # Megatron reads .grad of shards of parameters; below a TorchFunctionMode torch blames this file for it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def _replace_cuda_calls() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    cuda = torch.cuda
    # one function object each: torch._dynamo refuses a shared one
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *a, **k: None
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = _Stream
    cuda.current_stream = lambda *a, **k: _Stream()
    cuda.stream = lambda *a, **k: contextlib.nullcontext()
    megatron_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 defines the name only where TransformerEngine is installed


def _fill_gaps_of_gloo() -> None:
    """gloo wants split sizes as integers, and gathers only tensors of one size."""
    all_to_all_single, all_gather = dist.all_to_all_single, dist.all_gather

    def all_to_all_single_of_ints(
        output: Tensor, input: Tensor, output_split_sizes: object = None, input_split_sizes: object = None, **kwargs: object
    ) -> object:
        return all_to_all_single(output, input, _integers(output_split_sizes), _integers(input_split_sizes), **kwargs)

    def all_gather_of_any_size(outputs: list[Tensor], tensor: Tensor, group: object = None, async_op: bool = False) -> object:
        if len({t.shape for t in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        assert not async_op, "an uneven all_gather on gloo is synchronous"
        for rank, output in enumerate(outputs):
            if rank == dist.get_rank(group):
                output.copy_(tensor)
            dist.broadcast(output, group_src=rank, group=group)
        return None

    dist.all_to_all_single, dist.all_gather = all_to_all_single_of_ints, all_gather_of_any_size


def _integers(sizes: object) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
