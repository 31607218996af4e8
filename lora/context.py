"""What a forward pass calls so that adapters can add their updates to the base's outputs."""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv_calls import Finish

RoutedLora = Callable[[int, str, Tensor], Finish]
"""`LoraContext.begin` of rows that a router has sorted."""


class LoraContext(Protocol):
    """What a model's layer calls around its base linears, so that adapters can add their updates."""

    def begin(self, layer: int, group: str, x: Tensor) -> Finish:
        """Call it before the base's modules of a group compute ys from x: [T, in]. The returned function adds
        the updates to ys, in place.

        group: that of the modules' `LoraSite`. ys: [T, out_m] each, in the order of the sites. They may be
        strided slices of one tensor. x must not change in between.
        """

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Change the embedded rows x: [T, hidden] of tokens: [T], in place."""

    def routed(self, tokens: Tensor, experts: Tensor) -> RoutedLora | None:
        """The updates of experts, for rows that a router has sorted by expert and, within an expert, by
        token; None if no adapter of the step changes experts. tokens, experts: [N] int64 of each row."""

    def factors(self, layer: int, module: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The updates of a module that is alone in its group, for each run of tokens with one adapter: the
        tokens, A [rank, inputs], and B^T [rank, outputs], which contains the scaling. For modules whose
        weight is not multiplied as a whole. Waits for the device."""

    @property
    def rescales(self) -> bool:
        """Whether `rescale` does anything."""

    def rescale(self, layer: int, group: str, ys: tuple[Tensor, ...]) -> None:
        """Multiplies the base's outputs of a group of modules by gains and adds shifts, in place."""

    def fused(self) -> LoraStep | None:
        """The adapters of all layers, for a forward pass in one call; None if layers must call `begin`."""


class LoraOutput(Protocol):
    """The adapters of some rows. They update the rows' logits."""

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Updates `logits`: [S, vocabulary] float32 in place. x: [S, hidden], from which they were
        computed."""
