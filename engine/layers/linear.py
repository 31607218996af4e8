"""Linear modules; those that share an input are merged into one matrix, so that each is one GEMM."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.kernels.decoder import LinearWeights, PackedLinear, pack_quantized
from personae.kernels.quantized import FORMATS, Quantization, QuantizedWeight


class Linear:
    """y = x W^T + b. The rows of W belong to one module, or to several one after the other (q, k, v).

    weight: [sum of outputs, inputs], allocated here and filled by the loader through `tensors()`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.outputs = list(outputs)
        self.dtype = dtype
        self.weight: Tensor | QuantizedWeight = torch.empty(sum(outputs), inputs, dtype=dtype, device=device)
        self.bias = torch.empty(sum(outputs), dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None
        self._own: PackedLinear | None = None

    @property
    def weights(self) -> LinearWeights:
        """The tensors."""
        return LinearWeights(self.weight, self.bias)

    def quantize(self, quantization: Quantization) -> None:
        """From now on the weight is kept so; call before it is filled."""
        assert isinstance(self.weight, Tensor)
        outputs, inputs = self.weight.shape
        self.weight = FORMATS[quantization].empty(outputs, inputs, self.weight.device)

    def tensors(self, *names: str) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
        """(checkpoint name, the view to fill) of each module's weight and bias; one name per module, or one
        for all of them where the checkpoint has them merged too."""
        sizes = self.outputs if len(names) > 1 else [sum(self.outputs)]
        for name, weight in zip(names, self.weight.split(sizes), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", bias

    def pack(self) -> None:
        """Lays a bfloat16 CPU weight out as oneDNN likes it, a quantized one as the backend does, where this
        machine can; call once it is filled.

        At decode sizes the packed product is up to twice as fast (the plain one reorders the weight at each
        call). The plain weight is let go, unless someone else holds it (a tied embedding).
        """
        if isinstance(self.weight, QuantizedWeight):
            packed = pack_quantized(self.weights, self.dtype)
            if packed is not None:
                self.hand_over(packed)
        elif can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.weight = self.weight.new_empty(0)

    def hand_over(self, packed: PackedLinear) -> None:
        """From now on `packed`, made from these tensors, does the work; the plain weight is let go."""
        self._own = packed
        self.weight = torch.empty(0, dtype=self.dtype)

    def plain(self) -> Tensor:
        """The weight as it was filled, [sum of outputs, inputs]; a copy where it was packed or quantized."""
        if self._own is not None:
            return self._own.plain()
        if self._packed is not None:
            return self._packed.to_dense()
        return self.weight if isinstance(self.weight, Tensor) else self.weight.plain(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, sum of outputs]."""
        if self._own is not None:
            return self._own(x)
        if self._packed is None:
            return F.linear(x, self.plain(), self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed bfloat16 product for this weight on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
