"""What every layer needs to know about the step it is part of."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.decoder import LoraStep

LoraGroup = Literal["qkv", "o", "gate_up", "down"]


class LoraLayers(Protocol):
    """The adapters of a step: adds each row's low-rank update to the outputs of the base linear modules."""

    def apply(self, layer: int, group: LoraGroup, x: Tensor, ys: tuple[Tensor, ...]) -> None:
        """Updates `ys` in place.

        x: [T, in], the group's input; ys: the outputs [T, out] of its modules, in the order of the group's
        name, perhaps strided views of one tensor.
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
class Step:
    """One forward pass over T packed tokens."""

    positions: Tensor
    """[T] int64: each token's position in its own sequence."""
    batch: AttentionBatch
    lora: LoraLayers | None
