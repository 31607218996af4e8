"""Root mean square normalisation."""

from torch import Tensor

from personae.kernels import reference
from personae.kernels.registry import select


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension of x [..., N] -> [..., N]; see `reference.rms_norm`."""
    return select(reference.rms_norm, x.device)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual and normalises the sum -> (normed, sum); see `reference.add_rms_norm`."""
    return select(reference.add_rms_norm, x.device)(x, residual, weight, eps)
