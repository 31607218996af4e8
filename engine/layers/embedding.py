"""A table of vectors, one for each token."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.quantization.base import Scheme
from personae.engine.quantization.unquantized import Unquantized
from personae.kernels.decoder import LinearWeights, PackedLinear, Weight, lookup, pack_linear
from personae.kernels.quantized import QuantizedWeight


class TokenEmbedding:
    """Looks rows up. The table keeps a file's bits if `scheme` says so for its `names` in the checkpoint, and
    a row is then rounded to `dtype` when it is looked up. Otherwise the table is in `dtype`.

    `packed`: what a backend has made of a table that keeps a file's bits; None before it has, or for others.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: int,
        width: int,
        *,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        method = scheme(names)
        if not method.as_stored:  # of what is rounded here the table keeps more
            method = Unquantized
        self.weight: Weight = method(rows, width, dtype, device).weight
        self.nbytes, self.device = self.weight.nbytes, device
        self._dtype = dtype
        self.packed: PackedLinear | None = None
        self._lookup = lookup(device, dtype)

    @property
    def in_bits(self) -> bool:
        """Whether it keeps the file's bits."""
        return self.packed is not None or isinstance(self.weight, QuantizedWeight)

    def pack(self) -> None:
        """Packs the table for this machine, if it keeps a file's bits."""
        if isinstance(self.weight, QuantizedWeight):
            packed = pack_linear(LinearWeights(self.weight, None), self._dtype)
            assert packed is not None  # or the scheme would not keep the bits
            self.hand_over(packed)

    def hand_over(self, packed: PackedLinear) -> None:
        """From now on `packed` has the rows. The table is freed."""
        self.packed = packed
        del self.weight

    def plain(self) -> Tensor:
        """The table in the model's dtype, [rows, width]; a copy if it keeps a file's bits."""
        if self.packed is not None:
            return self.packed.plain()
        return self.weight.plain(self._dtype) if isinstance(self.weight, QuantizedWeight) else self.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [T] int64 -> [T, width]."""
        if self.packed is not None:
            assert self._lookup is not None
            return self._lookup(self.packed, tokens)
        assert isinstance(self.weight, Tensor)
        return F.embedding(tokens, self.weight)
