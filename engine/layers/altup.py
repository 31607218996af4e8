"""AltUp and LAuReL, as in Gemma 3n: several residual streams, of which a layer computes with one.

A layer predicts all streams from all of them, computes with the active one, and corrects the others by the
error of its prediction. Sources: https://arxiv.org/abs/2301.13310, https://arxiv.org/abs/2411.07501.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.layers.per_layer_embedding import PerLayerInput, PerLayerInputSpec
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.unquantized import Unquantized
from personae.kernels.decoder import Weight
from personae.lora.sites import LoraSite

LEAST_SQUARE = 1e-5  # below this a stream's mean square counts as this


@dataclass(frozen=True, slots=True)
class AltUpSpec(UndividedSpec):
    """The third block of a layer with `streams` residual streams, of which it computes with the `active` one.
    `laurel`: the rank of LAuReL's matrices. `scaled`: the active stream has a scale of its own where the
    others read it, in `per_layer`."""

    kind = "AltUp"

    streams: int
    active: int
    laurel: int
    per_layer: PerLayerInputSpec
    scaled: bool

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def modules(self, hidden_size: int) -> dict[str, tuple[str, int, int]]:
        """Its linear modules but those of `per_layer`, by short names: name, inputs, outputs."""
        return {
            "laurel_left": ("laurel.linear_left", hidden_size, self.laurel),
            "laurel_right": ("laurel.linear_right", self.laurel, hidden_size),
            "altup_router": ("altup.modality_router", hidden_size, self.streams),
            "altup_predict": ("altup.prediction_coefs", self.streams, self.streams**2),
            "altup_correct": ("altup.correction_coefs", self.streams, self.streams),
        }

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        own = {
            key: LoraSite(name, key, inputs, outputs)
            for key, (name, inputs, outputs) in self.modules(hidden_size).items()
        }
        return {**own, **self.per_layer.lora_sites(hidden_size)}

    def build(self, context: BlockContext) -> "AltUp":
        """See BlockSpec."""
        return AltUp(self, context)


class AltUp(UndividedBlock):
    """With m = tanh(W_router norm(x) / hidden) of the active stream x: the streams h are predicted as p = h +
    C(m) h and corrected to p + (1 + c(m)) (y - p_active), where y is the active stream after the layer."""

    kv, heads, capturable = None, 0, True

    def __init__(self, spec: AltUpSpec, context: BlockContext) -> None:
        self.spec, self.layer, self.prefix = spec, context.layer, context.prefix
        hidden, dtype, device = context.hidden_size, context.dtype, context.device
        self.firsts: dict[str, Linear] = {}
        for key, (name, inputs, outputs) in spec.modules(hidden).items():
            names = (f"{self.prefix}.{name}",)
            # The coefficients are few, so they keep the model's dtype.
            self.firsts[key] = (
                context.linear(names, inputs, (outputs,), bias=False)
                if key.startswith("laurel")
                else Linear(
                    names, inputs, (outputs,), bias=False, method=Unquantized, dtype=dtype, device=device
                )
            )
        self.router_norm, self.laurel_norm = context.norm(hidden), context.norm(hidden)
        self.scale = torch.empty(hidden, dtype=torch.float32, device=device)
        self.per_layer: PerLayerInput = spec.per_layer.build(context)
        self._part = 1 / hidden

    def predict(self, streams: Tensor, step: ForwardContext) -> Tensor:
        """[T, streams, hidden] -> the same, as they are expected after the layer."""
        modes, count = self._modes(streams[:, self.spec.active], step), self.spec.streams
        mixed = self._linear("altup_predict", modes, step).view(-1, count, count) @ streams
        return mixed + streams

    def laurel(self, x: Tensor, step: ForwardContext) -> Tensor:
        """x + norm(W_right W_left x) of the normed active stream [T, hidden]."""
        inner = self._linear("laurel_left", x, step)
        return x + self.laurel_norm(self._linear("laurel_right", inner, step))

    def correct(self, predicted: Tensor, x: Tensor, step: ForwardContext) -> Tensor:
        """[T, streams, hidden] and the active stream after the layer [T, hidden] -> all streams after it."""
        gains = self._linear("altup_correct", self._modes(x, step), step) + 1
        error = x - predicted[:, self.spec.active]
        corrected = predicted + gains.unsqueeze(2) * error.unsqueeze(1)
        corrected[:, 1:] += self(corrected[:, self.spec.active], step).unsqueeze(1)
        return corrected

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block: the corrected active stream -> what all streams but the first get of the token's
        embedding for the layer."""
        scaled = (x.float() * self.scale).to(x.dtype) if self.spec.scaled else x.contiguous()
        return self.per_layer(scaled, step)

    def _modes(self, x: Tensor, step: ForwardContext) -> Tensor:
        routed = self._linear("altup_router", self.router_norm(x) * self._part, step)
        return routed.float().tanh_().to(x.dtype)

    def _linear(self, key: str, x: Tensor, step: ForwardContext) -> Tensor:
        return step.linear(self.firsts[key], self.layer, key, x)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for linear in self.firsts.values():
            yield from linear.tensors()
        yield f"{self.prefix}.altup.correct_output_scale", self.scale
        yield from self.router_norm.tensors(f"{self.prefix}.altup.router_norm")
        yield from self.laurel_norm.tensors(f"{self.prefix}.laurel.post_laurel_norm")
        yield from self.per_layer.tensors()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield self.router_norm
        yield self.laurel_norm
        yield from self.per_layer.norms()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        for key, linear in self.firsts.items():
            if key.startswith("laurel"):
                yield linear
        yield from self.per_layer.linears()

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        for key, linear in self.firsts.items():
            yield (key,), linear
        yield from self.per_layer.lora_linears()


class AltUpStreams:
    """Makes `count` streams of the embedding, and one result of all of them: each is a product, brought to
    the size of the first."""

    def __init__(self, streams: int, context: BlockContext) -> None:
        hidden, self.count = context.hidden_size, streams
        self._apart, self._together = (
            [
                context.linear((f"model.{name}.{index}",), hidden, (hidden,), bias=False)
                for index in range(streams - 1)
            ]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def apart(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, streams, hidden]."""
        return torch.stack([x, *(_sized(linear(x), x) for linear in self._apart)], 1)

    def together(self, streams: Tensor) -> Tensor:
        """[T, streams, hidden] -> [T, hidden]."""
        first, *others = streams.unbind(1)
        found = [first]
        for linear, x in zip(self._together, others, strict=True):
            found.append(_sized(linear(x.contiguous()), first))
        return torch.stack(found).mean(0)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill) of each parameter."""
        for linear in self.linears():
            yield from linear.tensors()

    def linears(self) -> Iterator[Linear]:
        """Its linear modules."""
        yield from self._apart
        yield from self._together


def _sized(x: Tensor, first: Tensor) -> Tensor:
    """x with the root mean square of `first`."""
    wanted, own = (part.float().square().mean(-1, keepdim=True) for part in (first, x))
    return (x.float() * (wanted / own.clamp(min=LEAST_SQUARE)).sqrt()).to(x.dtype)
