"""Normalisations with their weights."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.kernels.operators import add_rms_norm, rms_norm


class Norm(Protocol):
    """Normalises vectors of `width` numbers. The loader fills `tensors`; `finish` is called once after it."""

    width: int
    weight: Tensor

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, the view to fill) of each parameter of a norm called `name`."""

    def finish(self) -> None:
        """Adds the offset to the weight. Call it once, after loading."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> normalised."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised residual + x, residual + x), each [T, size]."""


NormFactory = Callable[[int], Norm]


class RMSNorm:
    """See Norm. weight: [size] float32. dtype: of x."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.eps = eps
        self.width = size
        self._offset = offset
        self._norm, self._add_norm = rms_norm.on(device, dtype), add_rms_norm.on(device, dtype)

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """See Norm."""
        yield f"{name}.weight", self.weight

    def finish(self) -> None:
        """See Norm."""
        self.weight += self._offset

    def __call__(self, x: Tensor) -> Tensor:
        """See Norm."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        return self._add_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """See Norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, in float32, rounded once
    (https://arxiv.org/abs/1607.06450). weight, bias: [size] float32; bias: None for none."""

    def __init__(
        self, size: int, eps: float, *, device: torch.device, bias: bool = False, offset: float = 0.0
    ) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.bias = torch.empty(size, dtype=torch.float32, device=device) if bias else None
        self.eps = eps
        self.width = size
        self._offset = offset

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """See Norm."""
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias

    def finish(self) -> None:
        """See Norm."""
        self.weight += self._offset

    def __call__(self, x: Tensor) -> Tensor:
        """See Norm."""
        return F.layer_norm(x.float(), (self.width,), self.weight, self.bias, self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        total = residual + x
        return self(total), total
