"""Linear modules. Modules that share an input are merged into one matrix, which is one GEMM."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.parallel.comm import ONE_RANK, Collectives
from personae.engine.quantization.base import Backend, LinearMethod, Product
from personae.kernels.decoder import LinearWeights, PackedLinear, Weight
from personae.lora.shards import INPUTS, OUTPUTS, Shard


class Linear:
    """y = x W^T + b. The rows of W belong to one module, or to several in order (q, k, v).

    names: the modules' names in the checkpoint; a single name if it has several of `outputs` merged. `method`
    is the weight's format (`engine/quantization/`). It is allocated here, and the loader fills it through
    `tensors()`. `shards`: the part of each name's tensors that is this rank's, empty for all of them. `comm`:
    the ranks that have the other parts.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        *,
        bias: bool,
        method: type[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
        shards: Sequence[Shard] = (),
        comm: Collectives = ONE_RANK,
    ) -> None:
        self.names = names
        self._shards = shards
        self.outputs = list(outputs)
        self.method = method(sum(outputs), inputs, dtype, device)
        if any(shard.dim == INPUTS for shard in shards):
            self.method.ranks = comm
        self.bias = torch.empty(sum(outputs), dtype=dtype, device=device) if bias else None
        self._product: Product = self.method

    @property
    def weights(self) -> LinearWeights:
        """The tensors. Only before a packed form replaces them."""
        assert self._product is self.method
        return LinearWeights(self.method.weight, self.bias)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill) of each module's weight and bias."""
        sizes = self.outputs if len(self.names) > 1 else [sum(self.outputs)]
        for name, weight in zip(self.names, self.method.params(sizes), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(self.names, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", bias

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """(checkpoint name, this rank's part) of each tensor of which it has only a part."""
        for name, shard in zip(self.names, self._shards, strict=bool(self._shards)):
            yield f"{name}.weight", shard
            if self.bias is not None and shard.dim == OUTPUTS:
                yield f"{name}.bias", shard

    def pack(self) -> None:
        """Packs the weight for this machine. Call it once, after loading."""
        self._use(self.method.finish(self.bias))

    @property
    def packed(self) -> PackedLinear | None:
        """What a backend has made of it; None if no backend has packed it."""
        return self._product.packed if isinstance(self._product, Backend) else None

    def hand_over(self, packed: Iterator[PackedLinear]) -> None:
        """From now on the next of `packed`, made from these tensors, does the work. The plain weight is
        freed."""
        self._use(Backend(next(packed)))

    def _use(self, product: Product) -> None:
        self._product = product
        if product is not self.method:
            del self.method

    def plain(self) -> Tensor:
        """The weight as it was loaded, [sum of outputs, inputs]; a copy if it is packed or quantized."""
        return self._product.plain()

    def project(self, x: Tensor) -> Tensor:
        """As a call, but with x as it is, even if the product rounds what it multiplies."""
        if isinstance(self._product, LinearMethod) and self._product.rounds_inputs:
            return F.linear(x, self.plain(), self.bias)
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, sum of outputs]."""
        return self._product.apply(x, self.bias)
