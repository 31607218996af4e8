"""The gated activation between the two halves of an MLP."""

from torch import Tensor

from personae.kernels import reference
from personae.kernels.registry import select


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] = (gate, up) -> [T, I]; see `reference.silu_and_mul`."""
    return select(reference.silu_and_mul, x.device)(x)


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] = (gate, up) -> [T, I]; see `reference.gelu_and_mul`."""
    return select(reference.gelu_and_mul, x.device)(x)
