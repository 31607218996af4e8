"""RMS normalisation with its weight."""

import torch
from torch import Tensor

from personae.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """weight: [size] float32, which the loader fills; `finish` adds `offset` to it. dtype: of x."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.eps = eps
        self.width = size
        self._offset = offset
        self._norm, self._add_norm = rms_norm.on(device, dtype), add_rms_norm.on(device, dtype)

    def finish(self) -> None:
        """Adds the offset to the weight. Call it once, after loading."""
        self.weight += self._offset

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> normalised."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised residual + x, residual + x), each [T, size]."""
        return self._add_norm(x, residual, self.weight, self.eps)
