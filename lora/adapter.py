"""What an adapter is: for some modules of some layers, a low-rank change of their weight; its name is its
content.

An adapter's identity is its digest. A folder's name may change, and may come to mean something else; the
digest cannot, so it is what requests are bound to and what the prefix cache is keyed by.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# The linear modules of a layer that an adapter may change, by the input they share (one SGMV call each).
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


@dataclass(frozen=True, slots=True)
class LoraShapes:
    """What an adapter has to fit: the base's number of layers, and (in, out) of each module of a layer.

    The modules are named as in GROUPS: q, k, v, o, gate, up, down.
    """

    layers: int
    modules: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The change of one linear module: W + scaling * B A (https://arxiv.org/abs/2106.09685).

    a: [rank, in], A. b: [rank, out], B^T, contiguous: both halves of one rank are rows. Both on the CPU, in
    the dtype of their file; the scaling is apart until the pool folds it into b in float32, so it costs one
    rounding.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """The number of ranks."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter, checked against the base it was read for.

    digest: sha256 in hex of its content. pairs: by (layer, module). ranks: by module, the largest over the
    layers, which is what the adapter occupies in every layer. peak: the largest magnitude of A and of
    scaling * B, to tell whether a dtype can hold it. nbytes: of the tensors as held here.
    """

    name: str
    digest: str
    pairs: Mapping[tuple[int, str], LoraPair]
    ranks: Mapping[str, int]
    peak: float
    nbytes: int


def make_adapter(name: str, pairs: Mapping[tuple[int, str], LoraPair]) -> Adapter:
    """The adapter of these pairs; its digest, ranks, peak and size are computed. The tensors must be
    finite."""
    ranks: dict[str, int] = {}
    peak, nbytes = 0.0, 0
    for (_, module), pair in pairs.items():
        ranks[module] = max(ranks.get(module, 0), pair.rank)
        peak = max(peak, magnitude(pair.a), magnitude(pair.b) * abs(pair.scaling))
        nbytes += pair.a.nbytes + pair.b.nbytes
    return Adapter(name, _digest(pairs), dict(pairs), ranks, peak, nbytes)


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude in a tensor that is not empty; NaN or infinity if it holds one."""
    return float(tensor.abs().max())


def _digest(pairs: Mapping[tuple[int, str], LoraPair]) -> str:
    """sha256 over everything that decides what the adapter computes, and over nothing else."""
    digest = hashlib.sha256(b"personae lora 1\n")
    for (layer, module), pair in sorted(pairs.items(), key=lambda item: item[0]):
        digest.update(f"{layer} {module} ".encode() + struct.pack("<d", pair.scaling))
        for half in (pair.a, pair.b):
            digest.update(f"{half.dtype} {list(half.shape)} ".encode())
            digest.update(half.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
