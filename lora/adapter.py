"""Adapters: low-rank changes of some modules' weights in some layers, identified by their content.

An adapter's identity is its digest. A folder may be renamed, or get other content; the digest cannot change.
So requests are bound to it, and the prefix cache is keyed by it.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from personae.lora.dora import DoraBias
from personae.lora.shapes import LoraShapes
from personae.lora.single import magnitude
from personae.lora.throttle import Rest, no_rest
from personae.lora.vocabulary import VocabularyChange


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The change of one linear module: W + scaling * B A (https://arxiv.org/abs/2106.09685).

    a: [rank, in], A. b: [rank, out], B^T, contiguous: both halves of one rank are rows. Both are on the CPU,
    in the dtype of their file. The scaling is separate until the pool folds it into b in float32, so it costs
    one rounding. ready: it is folded in, and both are in the device's form (`lora/writing.py`). experts: of
    how many modules it is the change, each with as many of the ranks, one after the other.
    """

    a: Tensor
    b: Tensor
    scaling: float
    ready: bool = False
    experts: int = 1

    @property
    def rank(self) -> int:
        """The number of ranks."""
        return self.a.shape[0]

    def peaks(self) -> tuple[float, float]:
        """The largest magnitudes of A and of scaling * B."""
        return magnitude(self.a), magnitude(self.b) * abs(self.scaling)

    def reach(self) -> float:
        """An upper bound of the magnitude of every entry of scaling * B A."""
        return self.reach_of(*self.peaks())

    def reach_of(self, a: float, b: float) -> float:
        """The same from its peaks."""
        return self.rank // self.experts * a * b


@dataclass(frozen=True, slots=True)
class StoredHalf:
    """One half of a module in a file: where its bytes begin, and their CRC-32."""

    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class StackFile:
    """A file of stacks, and where the halves, "a" and "b", of its modules are in it (`lora/stored.py`)."""

    path: Path
    halves: Mapping[tuple[str, str], StoredHalf]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter, checked against the base that it was read for.

    digest: sha256 of its content, in hex. pairs: by (layer, module). ranks: by module, the largest over the
    layers, which the adapter occupies in every layer. peak: the largest magnitude of A and of scaling * B, to
    check whether a dtype can hold it. reach: an upper bound of the magnitude of every entry of scaling * B A,
    for the same purpose. nbytes: of the tensors as held here.

    dora_bias: by (layer, module), changes of outputs beyond low rank. vocabulary: changes of the embedding
    and the output. invocation: the tokens whose last occurrence in the prompt activates it (activated LoRA);
    if empty, it is active from the first token on. stacks: by module, A [layers, rank, in] and B^T [layers,
    rank, out], if the host keeps adapters this way (`lora/stacking.py`); the pairs are parts of them. stored:
    the file that has the stacks, if they are not in memory; then there are no pairs. experts: by module, how
    many experts share its ranks; only of modules of experts.
    """

    name: str
    digest: str
    pairs: Mapping[tuple[int, str], LoraPair]
    ranks: Mapping[str, int]
    peak: float
    nbytes: int
    dora_bias: Mapping[tuple[int, str], DoraBias] = field(default_factory=dict)
    vocabulary: tuple[VocabularyChange, ...] = ()
    invocation: tuple[int, ...] = ()
    stacks: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stored: StackFile | None = None
    reach: float = 0.0
    experts: Mapping[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of all modules; 0 if there are none."""
        return max((rank // self.experts.get(key, 1) for key, rank in self.ranks.items()), default=0)

    def extra_bytes(self, shapes: LoraShapes) -> int:
        """The most bytes of device memory that it needs in addition to its ranks."""
        vectors = 2 * 4 * shapes.layers * sum(shapes.modules[m][1] for m in {m for _, m in self.dora_bias})
        return vectors + sum(4 * t.numel() for change in self.vocabulary for _, t in change.tensors())

    def traits(self) -> tuple[str, ...]:
        """Its features beyond low rank on linear modules, in words."""
        names = {name for dora_bias in self.dora_bias.values() for name, _ in dora_bias.tensors()}
        words = {"magnitude": "DoRA", "lora_bias": "a bias on lora_B", "bias": "trained biases"}
        found = [words[name] for name in words if name in names]
        found += [change.kind for change in self.vocabulary]
        return (*found, "activated LoRA") if self.invocation else tuple(found)


def make_adapter(
    name: str,
    pairs: Mapping[tuple[int, str], LoraPair],
    *,
    dora_bias: Mapping[tuple[int, str], DoraBias] | None = None,
    vocabulary: tuple[VocabularyChange, ...] = (),
    invocation: tuple[int, ...] = (),
    digest: str | None = None,
    rest: Rest = no_rest,
) -> Adapter:
    """Makes an adapter. Its ranks, peak, size and (unless given) digest are computed. All tensors must be
    finite. `rest` is called regularly."""
    ranks: dict[str, int] = {}
    peak, reach, nbytes = 0.0, 0.0, 0
    for (_, module), pair in pairs.items():
        rest()
        ranks[module] = max(ranks.get(module, 0), pair.rank)
        peaks = pair.peaks()
        peak, reach = max(peak, *peaks), max(reach, pair.reach_of(*peaks))
        nbytes += pair.a.nbytes + pair.b.nbytes
    adapter = Adapter(
        name, digest or "", dict(pairs), ranks, peak, nbytes, dict(dora_bias or {}), vocabulary, invocation
    )
    for change in vocabulary:
        reach = max(reach, change.reach())
    deltas = list(_deltas(adapter))
    for label, tensor in deltas:
        nbytes += tensor.nbytes
        if not label.endswith(" ids"):
            peak = max(peak, magnitude(tensor))
    digest = digest or _digest(pairs, deltas, invocation, rest)
    experts = {module: pair.experts for (_, module), pair in pairs.items() if pair.experts > 1}
    return replace(adapter, peak=peak, reach=reach, nbytes=nbytes, digest=digest, experts=experts)


def _deltas(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for (layer, module), dora_bias in sorted(adapter.dora_bias.items(), key=lambda item: item[0]):
        for name, tensor in dora_bias.tensors():
            yield f"{layer} {module} {name}", tensor
    for change in sorted(adapter.vocabulary, key=lambda change: change.kind):
        for name, tensor in change.tensors():
            yield f"{change.kind} {name}", tensor


def _digest(
    pairs: Mapping[tuple[int, str], LoraPair],
    deltas: Iterable[tuple[str, Tensor]],
    invocation: tuple[int, ...],
    rest: Rest,
) -> str:
    """sha256 over everything that affects what the adapter computes, and nothing else."""
    digest = hashlib.sha256(b"personae lora 1\n")
    for (layer, module), pair in sorted(pairs.items(), key=lambda item: item[0]):
        digest.update(f"{layer} {module} ".encode() + struct.pack("<d", pair.scaling))
        for half in (pair.a, pair.b):
            rest()
            _add(digest, half)
    for label, tensor in deltas:
        rest()
        digest.update(f"{label} ".encode())
        _add(digest, tensor)
    if invocation:
        digest.update(f"invocation {invocation}".encode())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
