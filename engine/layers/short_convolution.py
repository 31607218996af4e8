"""Short convolutions: a token is mixed with the few tokens before it, number by number.

The cache keeps what the convolution reads of every token, as it keeps keys. So a page can be shared, copied
and computed again at any token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext, KVSpec, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import Weight
from personae.kernels.operators import append_latent, short_convolution
from personae.lora.sites import LoraSite


class Convolution:
    """y_t = sum_j w_j x_(t - K + 1 + j) + b of each of `width` numbers, K = `length`. The loader fills
    `tensors`. weight: [width, length], bias: [width], both float32."""

    def __init__(self, name: str, width: int, length: int, *, bias: bool, context: BlockContext) -> None:
        self._name = name
        self.weight = torch.empty(width, length, dtype=torch.float32, device=context.device)
        self.bias = torch.empty(width, dtype=torch.float32, device=context.device) if bias else None
        self._append = append_latent.on(context.device, context.dtype)
        self._convolution = short_convolution.on(context.device, context.dtype)

    def __call__(self, x: Tensor, cache: Tensor, step: ForwardContext) -> Tensor:
        """Puts x: [T, width] into the cache -> [T, width] float32."""
        self._append(x.unsqueeze(1), cache, step.batch.write_index)
        return self._convolution(cache, step.batch, step.positions, self.weight, self.bias)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill) of each parameter."""
        yield f"{self._name}.weight", self.weight.unsqueeze(1)
        if self.bias is not None:
            yield f"{self._name}.bias", self.bias


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec(UndividedSpec):
    """LFM2's. `length`: the tokens that a token sees, itself included. `bias`: of all modules."""

    kind = "short convolutions"

    width: int
    length: int
    bias: bool = False

    @property
    def kv(self) -> KVSpec:
        """See BlockSpec."""
        return KVSpec(1, self.width, latent=0)

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        return {
            "conv_in": LoraSite("conv.in_proj", "conv_in", hidden_size, 3 * self.width),
            "conv_out": LoraSite("conv.out_proj", "conv_out", self.width, hidden_size),
        }

    def build(self, context: BlockContext) -> "ShortConvolution":
        """See BlockSpec."""
        return ShortConvolution(self, context)


class ShortConvolution(UndividedBlock):
    """(b, c, x) = W_in h, y = W_out (c * convolution(b * x))."""

    heads, capturable = 0, False

    def __init__(self, spec: ShortConvolutionSpec, context: BlockContext) -> None:
        prefix = f"{context.prefix}.conv"
        self.kv, self.layer = spec.kv, context.layer
        hidden = context.hidden_size
        self.first = context.linear((f"{prefix}.in_proj",), hidden, (3 * spec.width,), bias=spec.bias)
        self.last = context.linear((f"{prefix}.out_proj",), spec.width, (hidden,), bias=spec.bias)
        self.convolution = Convolution(
            f"{prefix}.conv", spec.width, spec.length, bias=spec.bias, context=context
        )

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        before, after, inner = step.linear(self.first, self.layer, "conv_in", x).chunk(3, -1)
        mixed = self.convolution(before * inner, step.caches[self.layer][0], step)
        return step.linear(self.last, self.layer, "conv_out", (after.float() * mixed).to(x.dtype))

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.first.tensors()
        yield from self.last.tensors()
        yield from self.convolution.tensors()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.first
        yield self.last

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("conv_in",), self.first
        yield ("conv_out",), self.last
