"""How adapters change the embedding and the output matrix.

Each kind of change is a class with its tensors as in the file. It makes a `DeviceDelta`: the tensors on the
device, and how they change the rows of one adapter. A change runs once per step and adapter, not per layer,
so plain torch is fast enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.lora.base import BaseWeights, Site
from personae.lora.dora import DoraBias
from personae.lora.single import magnitude

Place = Literal["embedding", "output"]


class DeviceDelta(Protocol):
    """A change on the device."""

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Change the embedded rows x: [n, hidden] of tokens: [n] int64, in place."""

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Change logits: [n, vocabulary] float32 of the normalised rows x: [n, hidden], in place."""


class VocabularyChange(Protocol):
    """A change as it was read. `places` says which matrices it changes; `kind` is its name in digests and
    messages."""

    @property
    def kind(self) -> str:
        """Its name."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The matrices that it changes."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything that affects what it computes."""

    def reach(self) -> float:
        """An upper bound of the entries of the change, if it is a product; otherwise 0."""

    def placed(self, base: BaseWeights, dtype: torch.dtype, device: torch.device) -> DeviceDelta:
        """Its form on the device. Raises AdapterError if its numbers cannot be computed."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """W + scaling * B A, optionally with DoRA's magnitude or a bias on B.

    a: [rank, in], b: [rank, out]. At the embedding `in` is the vocabulary and `out` the hidden size, at the
    output the reverse. The scaling is folded into b in float32.
    """

    place: Place
    a: Tensor
    b: Tensor
    scaling: float
    dora_bias: DoraBias

    @property
    def kind(self) -> str:
        """Its name."""
        return f"lora on {self.place}"

    @property
    def places(self) -> tuple[Place, ...]:
        """The matrix that it changes."""
        return (self.place,)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See VocabularyChange."""
        yield "a", self.a
        yield "b", self.b.float() * self.scaling
        yield from self.dora_bias.tensors()

    def reach(self) -> float:
        """See VocabularyChange."""
        return len(self.a) * magnitude(self.a) * magnitude(self.b) * abs(self.scaling)

    def placed(self, base: BaseWeights, dtype: torch.dtype, device: torch.device) -> DeviceDelta:
        """See VocabularyChange."""
        a, b = self.a.float(), self.b.float() * self.scaling
        site: Site = self.place
        gain, shift = self.dora_bias.resolve(base, site, a, b)
        if gain is not None:
            b = b * gain.cpu()
        vectors = [None if vector is None else vector.to(device) for vector in (gain, shift)]
        if self.place == "embedding":
            return DeviceEmbeddingDelta(a.T.contiguous().to(device, dtype), b.to(device, dtype), *vectors)
        return DeviceOutputDelta(a.to(device, dtype), b.to(device, dtype), *vectors)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceEmbeddingDelta:
    """x <- gain x + shift + a[token] b; a: [vocabulary, rank], b: [rank, hidden]."""

    a: Tensor
    b: Tensor
    gain: Tensor | None
    shift: Tensor | None

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """See DeviceDelta."""
        wide = x.float()
        if self.gain is not None:
            wide = wide * self.gain
        if self.shift is not None:
            wide = wide + self.shift
        x.copy_(torch.addmm(wide, F.embedding(tokens, self.a).float(), self.b.float()))

    def output(self, x: Tensor, logits: Tensor) -> None:
        """Changes nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOutputDelta:
    """y <- gain y + shift + x A^T b; a: [rank, hidden], b: [rank, vocabulary]."""

    a: Tensor
    b: Tensor
    gain: Tensor | None
    shift: Tensor | None

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Changes nothing."""

    def output(self, x: Tensor, logits: Tensor) -> None:
        """See DeviceDelta."""
        if self.gain is not None:
            logits.mul_(self.gain)
        if self.shift is not None:
            logits.add_(self.shift)
        logits.addmm_(F.linear(x, self.a).float(), self.b.float())


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of the embedding, of the output matrix, or of both, that replace the base's.

    ids: [n] int64 of tokens, ascending, or None for all of them. rows: [n, hidden].
    """

    places: tuple[Place, ...]
    ids: Tensor | None
    rows: Tensor

    @property
    def kind(self) -> str:
        """Its name."""
        return f"rows of {' and '.join(self.places)}"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See VocabularyChange."""
        if self.ids is not None:
            yield "ids", self.ids
        yield "rows", self.rows

    def reach(self) -> float:
        """It is not a product."""
        return 0.0

    def placed(self, base: BaseWeights, dtype: torch.dtype, device: torch.device) -> DeviceDelta:
        """See VocabularyChange."""
        ids = None if self.ids is None else self.ids.to(device)
        return DeviceRows(self.places, ids, self.rows.to(device, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """The rows on the device."""

    places: tuple[Place, ...]
    ids: Tensor | None
    rows: Tensor

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """See DeviceDelta."""
        if "embedding" not in self.places:
            return
        if self.ids is None:
            x.copy_(F.embedding(tokens, self.rows))
            return
        at = torch.searchsorted(self.ids, tokens).clamp_max(len(self.ids) - 1)
        theirs = (self.ids[at] == tokens)[:, None]
        x.copy_(torch.where(theirs, self.rows[at], x))

    def output(self, x: Tensor, logits: Tensor) -> None:
        """See DeviceDelta."""
        if "output" not in self.places:
            return
        found = F.linear(x, self.rows).float()
        if self.ids is None:
            logits.copy_(found)
        else:
            logits[:, self.ids] = found
