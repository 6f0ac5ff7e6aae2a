"""The frozen reference policy: a host copy of the initial weights, swapped into the actor's model for a forward pass.

One model on the device serves both, so the reference costs host memory only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """The weights of this rank's model chunks as they were when this was made."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        self._parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._reference = [_on_host(p).copy_(p.detach()) for p in self._parameters]
        self._actor = [_on_host(p) for p in self._parameters]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards the actor's again, bit for bit."""
        for parameter, reference, actor in zip(self._parameters, self._reference, self._actor, strict=True):
            actor.copy_(parameter)
            parameter.copy_(reference, non_blocking=True)
        try:
            yield
        finally:
            for parameter, actor in zip(self._parameters, self._actor, strict=True):
                parameter.copy_(actor, non_blocking=True)


def _on_host(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=parameter.is_cuda)
