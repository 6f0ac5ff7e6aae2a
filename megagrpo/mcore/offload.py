"""Device memory given back while the engine generates, and taken again: weights and optimizer state to the host, gradients dropped.

A storage is resized to zero and back, so that every view of it stays valid. Host copies are pinned, made once and kept: Megatron's
own optimizer.offload_to_cpu allocates unpinned memory anew every time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from megagrpo.config.schema import Actor


class ActorMemory:
    """What actor.{param,grad,optimizer}_offload release between the phases; on CPU nothing, with a warning."""

    def __init__(self, actor: Actor, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        wanted = [name for name in ("param_offload", "grad_offload", "optimizer_offload") if getattr(actor, name)]
        if wanted and not self._on_gpu:
            names = " and ".join(f"actor.{name}" for name in wanted)
            warnings.warn(f"{names} has no effect on CPU: there is no device memory to free", stacklevel=2)
            wanted = []
        self._params = Parking(keep_content=True) if "param_offload" in wanted else None
        self._grads = Parking(keep_content=False) if "grad_offload" in wanted else None
        self._optimizer = Parking(keep_content=True) if "optimizer_offload" in wanted else None

    def release_state(self, ddp_chunks: list, optimizer: object) -> None:
        """Give back gradients and optimizer state; the weights stay, for the sync."""
        if self._grads:
            self._grads.release(gradient_storages(ddp_chunks))
        if self._optimizer:
            self._optimizer.release(optimizer_storages(optimizer, ddp_chunks))
        self._empty_cache()

    def release_weights(self, ddp_chunks: list) -> None:
        """Give back the weights."""
        if self._params:
            self._params.release(parameter_storages(ddp_chunks))
        self._empty_cache()

    def restore(self) -> None:
        """Take everything again."""
        for parking in (self._params, self._grads, self._optimizer):
            if parking:
                parking.restore()

    def _empty_cache(self) -> None:
        if self._on_gpu:
            torch.cuda.empty_cache()


class Parking:
    """Tensors whose device storage can be released and restored, their content kept on the host or dropped."""

    def __init__(self, *, keep_content: bool) -> None:
        self._keep_content = keep_content
        self._host: dict[int, Tensor] = {}  # by id of the parked tensor, which the caller keeps alive
        self._parked: list[tuple[Tensor, int]] = []

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Free the device storage behind the tensors, each of which must cover all of its storage that matters."""
        assert not self._parked, "released twice without a restore"
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0:
                continue  # another tensor of the same storage came first
            if self._keep_content:
                self._host_copy(tensor, storage.size()).copy_(_bytes(storage), non_blocking=True)
            self._parked.append((tensor, storage.size()))
        self._wait_for_copies()
        for tensor, _ in self._parked:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the device storage again, with its content or, where that was dropped, zeros."""
        for tensor, size in self._parked:
            storage = tensor.untyped_storage()
            storage.resize_(size)
            if self._keep_content:
                _bytes(storage).copy_(self._host[id(tensor)], non_blocking=True)
            else:
                _bytes(storage).zero_()
        self._wait_for_copies()
        self._parked.clear()

    def _host_copy(self, tensor: Tensor, size: int) -> Tensor:
        if id(tensor) not in self._host:
            self._host[id(tensor)] = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        return self._host[id(tensor)]

    def _wait_for_copies(self) -> None:
        if any(tensor.is_cuda for tensor, _ in self._parked):
            torch.cuda.current_stream().synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def parameter_storages(ddp_chunks: list) -> list[Tensor]:
    """One tensor for every storage that holds weights: Megatron's flat buffers, and parameters outside of them."""
    return _one_per_storage(p for chunk in ddp_chunks for p in chunk.parameters())


def gradient_storages(ddp_chunks: list) -> list[Tensor]:
    """One tensor for every flat gradient buffer of Megatron's DistributedDataParallel."""
    return [buffer.grad_data for chunk in ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def optimizer_storages(optimizer: object, ddp_chunks: list) -> list[Tensor]:
    """One tensor for every storage of the optimizer's own: fp32 weights and moments, without the model's weights."""
    model = {t.untyped_storage().data_ptr() for t in parameter_storages(ddp_chunks)}
    own = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        own += [p for group in inner.param_groups for p in group["params"]]
        own += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return [t for t in _one_per_storage(own) if t.untyped_storage().data_ptr() not in model]


def _one_per_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    by_storage: dict[int, Tensor] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(by_storage.values())
