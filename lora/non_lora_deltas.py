"""The parts of resident adapters that are not low-rank updates of linear modules, by slot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.lora.adapter import Adapter
from personae.lora.base import BaseWeights
from personae.lora.copies import Copies
from personae.lora.dora import DoraBiasRows, DoraBiasTable
from personae.lora.shapes import LoraShapes
from personae.lora.vocabulary import DeviceDelta

Segment = tuple[int, int, int]
"""First row, rows, slot."""


class NonLoraDeltas:
    """Gains and shifts of linear modules, and changes of the vocabulary. Empty if no adapter has any."""

    def __init__(
        self, shapes: LoraShapes, base: BaseWeights | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._base = base
        self._dtype, self._device = dtype, device
        self._dora_bias = DoraBiasTable(
            shapes.layers, {m: out for m, (_, out) in shapes.modules.items()}, device
        )
        self._groups = shapes.groups
        self._vocabulary: dict[int, list[DeviceDelta]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._dora_bias or slot in self._vocabulary

    def __bool__(self) -> bool:
        return bool(self._dora_bias) or bool(self._vocabulary)

    def gain(self, slot: int, adapter: Adapter, layer: int, module: str, copies: Copies) -> Tensor | None:
        """Place one module's gain and shift, if the adapter has any. Returns the gain, [out] float32, for B.
        The computation with the base's weights runs in parallel with the steps."""
        dora_bias = adapter.dora_bias.get((layer, module))
        if dora_bias is None:
            return None
        assert self._base is not None, "an adapter with a gain or shift needs the base's weights"
        pair = adapter.pairs.get((layer, module))
        a, b = (None, None) if pair is None else (pair.a.float(), pair.b.float() * pair.scaling)
        with copies.overlap():
            gain, shift = dora_bias.resolve(self._base, (layer, module), a, b)
        self._dora_bias.put(slot, layer, module, gain, shift)
        return gain

    def place(self, slot: int, adapter: Adapter) -> Iterator[None]:
        """Place the changes of the vocabulary, piece by piece."""
        for change in adapter.vocabulary:
            assert self._base is not None, "an adapter with a vocabulary change needs the base's weights"
            placed = change.placed(self._base, self._dtype, self._device)
            self._vocabulary.setdefault(slot, []).append(placed)
            yield

    def drop(self, slot: int) -> None:
        """The slot's adapter is unloaded."""
        self._dora_bias.drop(slot)
        self._vocabulary.pop(slot, None)

    def of_step(self, segments: Sequence[Segment]) -> "StepDeltas | None":
        """What a step with these segments must do in addition to SGMV; None for nothing."""
        ours = [segment for segment in segments if segment[2] in self]
        if not ours:
            return None
        vocabulary = [
            (slice(first, first + count), self._vocabulary[slot])
            for first, count, slot in ours
            if slot in self._vocabulary
        ]
        return StepDeltas(self._dora_bias.rows(ours), vocabulary, self._groups)


@dataclass(frozen=True, slots=True)
class StepDeltas:
    """The non-LoRA deltas of a step's adapters. Rows are packed rows."""

    dora_bias: DoraBiasRows | None
    vocabulary: list[tuple[slice, list[DeviceDelta]]]
    groups: Mapping[str, tuple[str, ...]]

    def apply(self, layer: int, group: str, ys: tuple[Tensor, ...]) -> None:
        """Scale and shift the base's outputs of a group of modules, in place, before SGMV adds to them."""
        if self.dora_bias is not None:
            self.dora_bias.apply(layer, self.groups[group], ys)

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Change the embedded tokens, in place."""
        for rows, changes in self.vocabulary:
            for change in changes:
                change.embed(tokens[rows], x[rows])

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Change the logits, in place."""
        for rows, changes in self.vocabulary:
            for change in changes:
                change.output(x[rows], logits[rows])
