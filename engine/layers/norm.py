"""RMS normalisation with its weight."""

import torch
from torch import Tensor

from personae.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """weight: [size], filled by the loader."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> normalised."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised residual + x, residual + x), each [T, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)
