"""How adapters change the outputs of linear modules beyond low rank: y -> gain * y + shift.

- DoRA (https://arxiv.org/abs/2402.09353) gives each output a magnitude m: W' = m (W + s B A) / |W + s B A|,
  where the norm is that of each row. With the gain g = m / |W + s B A| this is g W + s (g B) A. So the base's
  output is scaled by g, and B is multiplied by g once, when the adapter is placed. A bias is not scaled: the
  shift corrects that.
- A bias on B (`lora_bias`) is a shift of scaling * bias.
- A trained bias of the base's module (`bias="lora_only"`, "all") is a shift by the difference.

The norm does not need the product of B and A: |W + s B A|^2 = |W|^2 + 2 s <B, W A^T> + s^2 <B, B A A^T>, row
by row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from personae.errors import AdapterError
from personae.kernels.upload import upload, uploads
from personae.lora.base import BaseWeights, Site


@dataclass(frozen=True, slots=True, eq=False)
class DoraBias:
    """An adapter's vectors for one module, [out] each, as in its file; None if it has no such vector.

    magnitude: DoRA's m. lora_bias: the bias on B. bias: replaces the module's own.
    """

    magnitude: Tensor | None = None
    lora_bias: Tensor | None = None
    bias: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each vector that exists."""
        for name in ("magnitude", "lora_bias", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def resolve(
        self, base: BaseWeights, site: Site, a: Tensor | None, b: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(gain, shift), [out] float32, None for 1 and 0.

        a: [rank, in], b: [rank, out] multiplied by the scaling, both float32; None without low rank.
        `lora_bias` must be multiplied by the scaling too. Raises AdapterError if a norm is zero.
        """
        gain = shift = None
        if self.magnitude is not None:
            gain = self.magnitude.float() / _norms(base, site, a, b)
            if not base.everywhere(bool(gain.isfinite().all())):
                raise AdapterError(f"DoRA of {base.name(site)}: a row of the changed weight is zero")
        before = base.bias(site)
        if self.bias is not None or (gain is not None and before is not None):
            old = torch.zeros(()) if before is None else before
            new = old if self.bias is None else self.bias.float()
            shift = new - (old if gain is None else gain * old)
        if self.lora_bias is not None:
            shift = self.lora_bias.float() if shift is None else shift + self.lora_bias.float()
        return gain, shift


def _norms(base: BaseWeights, site: Site, a: Tensor | None, b: Tensor | None) -> Tensor:
    squares = base.squares(site).double()
    if a is not None and b is not None:
        wide = b.double()
        squares = squares + 2 * (wide * base.project(site, a)).sum(0)
        squares += ((a.double() @ a.double().T) @ wide * wide).sum(0)
    return base.total(site, squares).clamp_min(0).sqrt().float()


class DoraBiasTable:
    """The gains and shifts of the adapters on the device, float32, and which rows of a step use them.

    It allocates memory once an adapter needs it, and grows by doubling.
    """

    def __init__(self, layers: int, widths: Mapping[str, int], device: torch.device) -> None:
        self._layers = layers
        self._widths = widths
        self._device = device
        self._vectors: dict[str, Tensor] = {}  # by module: [2 (gain, shift), layers, capacity, out]
        self._index: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._capacity = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._index

    def __len__(self) -> int:
        return len(self._index)

    def put(self, slot: int, layer: int, module: str, gain: Tensor | None, shift: Tensor | None) -> None:
        """Set one module's vectors. Until they are set, a slot's vectors are 1 and 0."""
        if slot not in self._index:
            self._index[slot] = self._take()
        if module not in self._vectors:
            self._vectors[module] = self._neutral(module, self._capacity)
        vectors, index = self._vectors[module], self._index[slot]
        for which, vector in enumerate((gain, shift)):
            if vector is not None:
                vectors[which, layer, index] = upload(vector.numpy(), self._device)

    def drop(self, slot: int) -> None:
        """The slot's adapter is unloaded."""
        index = self._index.pop(slot, None)
        if index is None:
            return
        self._free.append(index)
        if not self._index:
            self._vectors.clear()
            self._free.clear()
            self._capacity = 0
            return
        for vectors in self._vectors.values():
            vectors[0, :, index] = 1
            vectors[1, :, index] = 0

    def rows(self, segments: list[tuple[int, int, int]]) -> "DoraBiasRows | None":
        """The rows of a step that change. Segments are (first row, rows, slot)."""
        rows: list[int] = []
        index: list[int] = []
        for first, count, slot in segments:
            if slot in self._index:
                rows += range(first, first + count)
                index += [self._index[slot]] * count
        if not rows:
            return None
        there, whose = uploads((np.array(rows), np.array(index)), self._device)
        return DoraBiasRows(there, whose, self._vectors)

    def _take(self) -> int:
        if not self._free:
            old, self._capacity = self._capacity, max(4, 2 * self._capacity)
            self._free = list(reversed(range(old, self._capacity)))
            for module, vectors in self._vectors.items():
                self._vectors[module] = torch.cat(
                    (vectors, self._neutral(module, self._capacity - old)), dim=2
                )
        return self._free.pop()

    def _neutral(self, module: str, capacity: int) -> Tensor:
        vectors = torch.zeros(2, self._layers, capacity, self._widths[module], device=self._device)
        vectors[0] = 1
        return vectors


@dataclass(frozen=True, slots=True)
class DoraBiasRows:
    """A step's rows with a gain or shift, and the table index of each row: both [R] int64."""

    rows: Tensor
    index: Tensor
    vectors: Mapping[str, Tensor]

    def apply(self, layer: int, modules: tuple[str, ...], ys: tuple[Tensor, ...]) -> None:
        """y[i] = gain * y[i] + shift for the rows, in place. Computed in float32, rounded once."""
        for module, y in zip(modules, ys, strict=True):
            vectors = self.vectors.get(module)
            if vectors is not None:
                gain, shift = vectors[0, layer][self.index], vectors[1, layer][self.index]
                y[self.rows] = torch.addcmul(shift, y[self.rows].float(), gain).to(y.dtype)
