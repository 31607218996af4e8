"""Mixtures of experts: routing the tokens, the experts' products, and the weighted sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.decoder import PackedLinear
from personae.kernels.registry import Operator, optional


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits choose experts; see `reference.route_scored`.

    `groups`, `kept`: the experts are in groups of equal size, of which a token uses some. `epsilon` is added
    to the sum that renormalizes, and `least` is the smallest that it may be.
    """

    top_k: int
    renormalize: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept: int = 1
    scale: float = 1.0
    epsilon: float = 0.0
    least: float = 0.0


route = Operator(reference.route)
route_scored = Operator(reference.route_scored)
expert_linear = Operator(reference.expert_linear)
combine = Operator(reference.combine)

GroupedLinear = Callable[[Tensor, Sequence[PackedLinear], Sequence[int]], Tensor]
"""(x [N, inputs], packed weights of one shape without biases, counts) -> [N, outputs]: the first counts[0]
rows of x times the first weight, and so on. The bits are those of each weight's own product."""


def grouped_linear(device: torch.device, dtype: torch.dtype) -> GroupedLinear | None:
    """All products in one call, by the backend that packed the weights; None if it has no such operator."""
    return optional("grouped_linear", device, dtype)
