"""What every layer needs to know about its step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.kernels.attention import AttentionBatch, AttentionPlan
from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv import Finish
from personae.kernels.states import StatePlan

RoutedLora = Callable[[int, str, Tensor], Finish]
"""`LoraContext.begin` of rows that a router has sorted."""


class LoraContext(Protocol):
    """The adapters of a step. They add each row's low-rank update to the outputs of the base's linear
    modules."""

    def begin(self, layer: int, group: str, x: Tensor) -> Finish:
        """Call it before the modules of a group compute ys from x: [T, in]. Then call the returned function
        with ys, which it updates in place. x must not change in between.

        ys: the outputs [T, out] of the modules, in the order of the group's name. They may be strided views
        of one tensor.
        """

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Updates the embedded tokens in place. tokens: [T] int64, x: [T, hidden]."""

    def routed(self, tokens: Tensor, experts: Tensor) -> RoutedLora | None:
        """The adapters' updates of experts; see `lora/segments.py`. tokens, experts: [N] int64 of each row,
        sorted by expert and then by token."""

    def factors(self, layer: int, module: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The updates of a module that is alone in its group; see `lora/segments.py`."""

    @property
    def rescales(self) -> bool:
        """Whether `rescale` does anything."""

    def rescale(self, layer: int, group: str, ys: tuple[Tensor, ...]) -> None:
        """Multiplies the base's outputs of a group of modules by gains and adds shifts, in place."""

    def fused(self) -> LoraStep | None:
        """The adapters for a fused forward pass; None if layers must call `begin`."""


class LoraOutput(Protocol):
    """The adapters of some rows. They update the rows' logits."""

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Updates `logits`: [S, vocabulary] float32 in place. x: [S, hidden], from which they were
        computed."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Some of a step's packed tokens, which stages compute at a time. `batch` and `lora` are those of the
    part alone. A row may begin in one part and go on in the next."""

    tokens: slice
    batch: AttentionBatch
    lora: LoraContext | None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass over T packed tokens."""

    positions: Tensor
    """[T] int64: each token's position in its own sequence."""
    batch: AttentionBatch
    caches: Mapping[int, tuple[Tensor, Tensor]]
    """The keys and values of each layer."""
    states: Mapping[int, Tensor]
    """The states of each layer that has some."""
    attend: Mapping[int, AttentionPlan]
    """Attention over `batch`, as planned for this step, of each layer."""
    lora: LoraContext | None
    state_plan: StatePlan | None = None
    """Of the layers with states; None if there are none."""
    per_layer: Tensor | None = None
    """[T, layers, size]: each token's embedding for each layer, if the model has such."""

    def linear(self, module: Linear, layer: int, group: str, x: Tensor) -> Tensor:
        """module(x) and the adapters' updates: [T, inputs] -> [T, sum of outputs]."""
        if self.lora is None:
            return module(x)
        finish = self.lora.begin(layer, group, x)
        y = module(x)
        finish(torch.split(y, module.outputs, dim=-1))
        return y
