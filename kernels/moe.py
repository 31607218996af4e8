"""Mixtures of experts: routing the tokens, the experts' products, and the weighted sum."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.decoder import PackedLinear
from personae.kernels.registry import Operator, optional

route = Operator(reference.route)
expert_linear = Operator(reference.expert_linear)
combine = Operator(reference.combine)

GroupedLinear = Callable[[Tensor, Sequence[PackedLinear], Sequence[int]], Tensor]
"""(x [N, inputs], packed weights of one shape without biases, counts) -> [N, outputs]: the first counts[0]
rows of x times the first weight, and so on. The bits are those of each weight's own product."""


def grouped_linear(device: torch.device, dtype: torch.dtype) -> GroupedLinear | None:
    """All products in one call, by the backend that packed the weights; None if it has no such operator."""
    return optional("grouped_linear", device, dtype)
