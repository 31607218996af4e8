"""The experts of a mixture: which of them a token takes, their products, and the sum of what they say."""

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
rows of x times the first weight, and so on, with the bits that each weight's own product has."""


def grouped_linear(device: torch.device, dtype: torch.dtype) -> GroupedLinear | None:
    """All products in one call, by the backend that has packed the weights; None if it has none."""
    return optional("grouped_linear", device, dtype)
