"""The interface of a weight format, which every file of this folder implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.parallel.comm import ONE_RANK, Collectives
from personae.errors import ModelLoadError
from personae.kernels.decoder import LinearWeights, PackedLinear, Weight, pack_linear
from personae.kernels.quantized import QuantizedWeight, Stored
from personae.lora.shards import OUTPUTS, Shard

EMBEDDING, PER_LAYER, OUTPUT = "model.embed_tokens", "model.embed_tokens_per_layer", "lm_head"
"""The names in a checkpoint of the embeddings and of the output matrix. Schemes recognise them by these."""


class Product(Protocol):
    """Multiplies by a weight."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [T, inputs] -> x W^T + bias, [T, outputs]."""

    def plain(self) -> Tensor:
        """W: [outputs, inputs]; a copy if it is packed or quantized."""


class LinearMethod(ABC):
    """The weight of one linear module: allocated, then filled through `params`, then `loaded`.

    After that, either `finish` returns what multiplies from now on, or a backend takes `weight` over. It can
    also multiply without either. `as_stored`: the weight has the file's bits. `rounds_inputs`: the product
    rounds x as well. `ranks`: if this rank has only a part of each row of x, the ranks that have the other
    parts.
    """

    as_stored: ClassVar[bool] = False
    rounds_inputs: ClassVar[bool] = False

    weight: Weight
    ranks: Collectives = ONE_RANK

    @abstractmethod
    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the activations' dtype."""

    def params(self, sizes: list[int]) -> Iterator[Weight]:
        """The views to fill, one per entry of `sizes`, with that many outputs."""
        yield from self.weight.split(sizes)

    def parts(self, outputs: int) -> list[Self]:
        """Modules of `outputs` outputs each, which share this weight's memory."""
        found = [copy(self) for _ in self.weight.split(outputs)]
        for part, weight in zip(found, self.weight.split(outputs), strict=True):
            part.weight = weight
        return found

    @abstractmethod
    def tie(self, embedding: Weight) -> bool:
        """Use the embedding's weight, which is not filled yet. Returns False, with nothing changed, if the
        weight is filled like any other: from the file."""

    def loaded(self) -> None:  # noqa: B027  # most formats have nothing to do
        """Everything is filled, including the embedding."""

    @abstractmethod
    def finish(self, bias: Tensor | None) -> Product:
        """Packs the weight for this machine. The original may be freed after that."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""

    @abstractmethod
    def plain(self) -> Tensor:
        """See `Product`."""


Scheme = Callable[[Sequence[str]], type[LinearMethod]]
"""From a linear module's checkpoint names (three for q, k and v) to its format."""


class QuantizedMethod(LinearMethod):
    """A quantized weight. The device's backend multiplies by it if it can; otherwise each product dequantizes
    it."""

    kept: ClassVar[type[QuantizedWeight]]

    weight: QuantizedWeight

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.weight = self.kept.empty(outputs, inputs, device)
        self._tied: Tensor | None = None

    def tie(self, embedding: Weight) -> bool:
        """See `LinearMethod`: a copy, quantized once the embedding is filled."""
        assert isinstance(embedding, Tensor)
        self._tied = embedding
        return True

    def loaded(self) -> None:
        """See `LinearMethod`."""
        if self._tied is not None:
            self.weight.copy_(self._tied)
            self._tied = None

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`."""
        packed = pack_linear(LinearWeights(self.weight, bias), self.dtype)
        return self if packed is None else Backend(packed)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        return F.linear(x, self.plain(), bias)

    def plain(self) -> Tensor:
        """See `Product`."""
        return self.weight.plain(self.dtype)


class Backend:
    """A weight, and a bias, in a backend's packed form."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        return self.packed(x)

    def plain(self) -> Tensor:
        """See `Product`."""
        return self.packed.plain()


def load(name: str, place: Weight, stored: "StoredParts", shard: Shard | None = None) -> None:
    """Fills a parameter with a tensor of a checkpoint, or with a rank's part of it, and converts its dtype on
    the way.

    Raises ModelLoadError if its values do not fit.
    """
    if isinstance(place, QuantizedWeight):
        if shard is None:
            place.load(stored)
        else:
            _load_part(name, place, stored, shard)
        if not place.finite():
            raise ModelLoadError(
                f"{name} has values that are not finite, which quantized weights cannot represent"
            )
        return
    if shard is None:
        stored.copy_to(place)
    else:
        place.copy_(stored.part(shard))
    if place.dtype is torch.float16 and not place.isfinite().all():
        raise ModelLoadError(f"{name} has values that do not fit into float16; use bfloat16 or float32")


class StoredParts(Stored, Protocol):
    """A tensor of a checkpoint of which a rank may want a part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""

    def part(self, shard: Shard, /) -> Tensor:
        """A rank's part of it in a floating dtype."""


def _load_part(name: str, place: QuantizedWeight, stored: StoredParts, shard: Shard) -> None:
    """Quantizes the whole, so that all ranks together have the same numbers as one, and keeps the part."""
    outputs, inputs = stored.shape
    whole = type(place).empty(outputs, inputs, place.device)
    whole.load(stored)
    for own, full in zip(place.tensors(), whole.tensors(), strict=True):
        if shard.dim == OUTPUTS:
            own.copy_(shard.of(full))
        elif full.shape[1] == 1:  # a scale for all inputs
            own.copy_(full)
        else:
            own.copy_(_inputs_of(name, full, shard, inputs, own.shape[1]))


def _inputs_of(name: str, full: Tensor, shard: Shard, inputs: int, width: int) -> Tensor:
    """The rank's columns of a quantized weight's tensor. Raises ModelLoadError if they are not the `width`
    that whole blocks of inputs have."""
    try:
        part = shard.scaled(full.shape[1], inputs).of(full)
    except ValueError:
        part = None
    if part is None or part.shape[1] != width:
        raise ModelLoadError(
            f"{name}: --tensor-parallel-size would cut blocks of inputs in two, which this format keeps "
            "together; use fewer ranks or other weights"
        )
    return part
