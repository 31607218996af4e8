"""Weights in the model's dtype. On a CPU bfloat16 is laid out as oneDNN likes it, or as our own product
does."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.quantization.base import Backend, LinearMethod, Product, Scheme
from personae.kernels.decoder import LinearWeights, pack_linear


class Unquantized(LinearMethod):
    """weight: [outputs, inputs] in the model's dtype."""

    weight: Tensor

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)

    def tie(self, embedding: Tensor) -> None:
        """See `LinearMethod`: the same memory."""
        self.weight = embedding

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`. The plain weight is freed, unless a tied embedding holds it."""
        return OneDnn(self.weight) if can_pack(self.weight) else self

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        return F.linear(x, self.weight, bias)

    def plain(self) -> Tensor:
        """See `Product`."""
        return self.weight


class BatchInvariant(Unquantized):
    """On a CPU bfloat16 is multiplied by our own product: a row has the same bits in any company. It is as
    fast as oneDNN's for the few rows of decode steps, and takes up to 1.7 times as long for the many of a
    prompt."""

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`."""
        packed = pack_linear(LinearWeights(self.weight, bias), self.weight.dtype)
        return super().finish(bias) if packed is None else Backend(packed)


class OneDnn:
    """Bfloat16 in oneDNN's layout: at decode sizes up to twice as fast, since the plain product reorders the
    weight at each call."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return y

    def plain(self) -> Tensor:
        """See `Product`."""
        return self._packed.to_dense()


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed bfloat16 product for this weight on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def batch_invariant(scheme: Scheme) -> Scheme:
    """The same, with `BatchInvariant` for what is not quantized."""

    def chosen(names: Sequence[str]) -> type[LinearMethod]:
        method = scheme(names)
        return BatchInvariant if method is Unquantized else method

    return chosen


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """Every module."""
    return Unquantized
