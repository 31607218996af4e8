"""Muon for the matrices, Adam for the rest.

Muon (Jordan et al., 2024) replaces a matrix's momentum M by its nearest semi-orthogonal matrix, found by a
Newton-Schulz iteration: with X_0 = M / |M| and A = X X^T,  X <- a X + (b A + c A A) X.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic's coefficients a, b, c
ITERATIONS = 4


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, of `[n, rows, columns]`."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()  # the iteration is meant to be rough
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; matrices of one shape are treated as one batch."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: nothing here evaluates twice
        """One update of every matrix from its gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    momentum = state["momentum"]
                    assert parameter.grad is not None
                    momentum.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(momentum, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-scale)
