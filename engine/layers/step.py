"""What every layer needs to know about the step it is part of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.kernels.attention import AttentionBatch, AttentionPlan
from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv import Finish


class LoraContext(Protocol):
    """The adapters of a step: adds each row's low-rank update to the outputs of the base linear modules."""

    def begin(self, layer: int, group: str, x: Tensor) -> Finish:
        """Called before the modules of a group compute ys from x: [T, in], which stays as it is until what is
        returned is called with ys, the outputs [T, out] of the modules in the order of the group's name,
        perhaps strided views of one tensor. That updates them in place.
        """

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Updates the embedded tokens in place. tokens: [T] int64, x: [T, hidden]."""

    def fused(self) -> LoraStep | None:
        """The same for a forward pass in one call; None to be asked layer by layer."""


class LoraOutput(Protocol):
    """The adapters of some rows: updates their logits."""

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Updates `logits`: [S, vocabulary] float32 in place. x: [S, hidden], what they were made from."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass over T packed tokens."""

    positions: Tensor
    """[T] int64: each token's position in its own sequence."""
    batch: AttentionBatch
    caches: Mapping[int, tuple[Tensor, Tensor]]
    """By layer, its keys and values."""
    attend: Mapping[int, AttentionPlan]
    """By layer, attention over `batch` as it is planned for this step."""
    lora: LoraContext | None

    def linear(self, module: Linear, layer: int, group: str, x: Tensor) -> Tensor:
        """module(x) and the adapters' updates: [T, inputs] -> [T, sum of outputs]."""
        if self.lora is None:
            return module(x)
        finish = self.lora.begin(layer, group, x)
        y = module(x)
        finish(torch.split(y, module.outputs, dim=-1))
        return y
