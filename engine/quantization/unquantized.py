"""Weights in the model's dtype. On a CPU, bfloat16 is packed for oneDNN or for our own product."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.quantization.base import Backend, LinearMethod, Product, Scheme
from personae.kernels.decoder import LinearWeights, Weight, pack_linear
from personae.kernels.registry import optional


class Unquantized(LinearMethod):
    """weight: [outputs, inputs] in the model's dtype."""

    weight: Tensor

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)

    def tie(self, embedding: Weight) -> bool:
        """See `LinearMethod`: shares the embedding's memory."""
        assert isinstance(embedding, Tensor)
        self.weight = embedding
        return True

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`. The plain weight is freed, unless a tied embedding uses it."""
        return OneDnn(self.weight) if can_pack(self.weight) else self

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        return F.linear(x, self.weight, bias)

    def plain(self) -> Tensor:
        """See `Product`."""
        return self.weight


class BatchInvariant(Unquantized):
    """On a CPU, bfloat16 uses our own product, in which a row's bits do not depend on the other rows. It is
    as fast as oneDNN's for the few rows of decode steps, and takes up to 1.7 times as long for the many rows
    of a prompt."""

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`."""
        packed = pack_linear(LinearWeights(self.weight, bias), self.weight.dtype)
        return super().finish(bias) if packed is None else Backend(packed)


class OneDnn:
    """bfloat16 in oneDNN's packed layout. At decode sizes it is up to twice as fast, because the plain
    product reorders the weight in each call."""

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


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are fast on the device: it has instructions for them, or the CPU kernels
    do them. Without both each product converts its operands first, and takes up to four times as long as one
    of float32."""
    return (
        device.type != "cpu"
        or optional("pack_linear", device, torch.bfloat16) is not None
        or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def batch_invariant(scheme: Scheme) -> Scheme:
    """The same scheme with `BatchInvariant` for modules that are not quantized."""

    def chosen(names: Sequence[str]) -> type[LinearMethod]:
        method = scheme(names)
        return BatchInvariant if method is Unquantized else method

    return chosen


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """The model's dtype for every module."""
    return Unquantized
