"""Mixture of experts: a router chooses a few MLPs for each token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import GATES, Activation
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import Backend, LinearMethod, Product
from personae.engine.quantization.unquantized import BatchInvariant, Unquantized
from personae.kernels import reference
from personae.kernels.decoder import PackedLinear, Weight
from personae.kernels.moe import combine, expert_linear, grouped_linear, route
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """`top_k` of `experts` MLPs, each with inner vectors of `size`.

    `renormalize`: the weights of a token's experts add up to 1. `path`, `names`: the block's name in a layer,
    and the names of an expert's gate, up and down.
    """

    experts: int
    top_k: int
    size: int
    renormalize: bool
    activation: Activation = "silu"
    path: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return True

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec. Adapters cannot change experts."""
        return {}

    def build(self, context: BlockContext) -> "MoE":
        """See BlockSpec."""
        return MoE(self, context)


class ExpertLinear(Linear):
    """One linear module per expert, all of one shape. The weights are one tensor, [experts * outputs,
    inputs], until a backend packs each of them."""

    def __init__(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        experts: int,
        *,
        method: type[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            names, inputs, outputs * experts, bias=False, method=method, dtype=dtype, device=device
        )
        self._width = sum(outputs)
        self._experts: list[Product] = []
        self._packed: list[PackedLinear] = []  # the experts, if a backend has packed all of them
        self._batched: Tensor | None = None  # the weights [experts, outputs, inputs], if not packed
        self._all, self._linear = grouped_linear(device, dtype), expert_linear.on(device, dtype)

    @property
    def capturable(self) -> bool:
        """See Block. Valid after `pack`."""
        return self._batched is not None and self._linear is not reference.expert_linear

    def pack(self) -> None:
        """See Linear."""
        parts = self.method.parts(self._width)
        self._experts = [part.finish(None) for part in parts]
        packed = [expert.packed for expert in self._experts if isinstance(expert, Backend)]
        if self._all is not None and len(packed) == len(parts):
            self._packed = packed
        if isinstance(self.method, Unquantized) and self._experts == parts:
            self._batched = self.method.weight.view(len(parts), self._width, -1)
        if any(product is not part for product, part in zip(self._experts, parts, strict=True)):
            del self.method

    def plain(self) -> Tensor:
        """See Linear."""
        return torch.cat([expert.plain() for expert in self._experts])

    def grouped(self, x: Tensor, starts: Tensor) -> Tensor:
        """Rows starts[e] to starts[e + 1] - 1 of x: [N, inputs] through expert e -> [N, outputs].

        starts: [experts + 1] int32, on x's device.
        """
        if self._batched is not None:
            return self._linear(x, self._batched, starts)
        ends = starts.tolist()
        if self._packed and self._all is not None:
            return self._all(x, self._packed, [stop - start for start, stop in pairwise(ends)])
        y = torch.empty(x.shape[0], self._width, dtype=x.dtype, device=x.device)
        for expert, (start, stop) in zip(self._experts, pairwise(ends), strict=True):
            if start < stop:
                y[start:stop] = expert.apply(x[start:stop], None)
        return y


class MoE:
    """y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x).

    The w are the largest of softmax(router x). They and the sum are computed in float32. Rows are grouped by
    expert, so that each expert is read once.
    """

    kv, heads = None, 0

    def __init__(self, spec: MoeSpec, context: BlockContext) -> None:
        hidden, prefix = context.hidden_size, f"{context.prefix}.{spec.path}"
        dtype, device = context.dtype, context.device
        self.spec = spec
        gate, up, down = (
            [f"{prefix}.experts.{expert}.{name}" for expert in range(spec.experts)] for name in spec.names
        )
        self.router = Linear(
            (f"{prefix}.gate",),
            hidden,
            (spec.experts,),
            bias=False,
            method=BatchInvariant,
            dtype=dtype,
            device=device,
        )
        pairs = tuple(name for pair in zip(gate, up, strict=True) for name in pair)
        self.gate_up = ExpertLinear(
            pairs,
            hidden,
            (spec.size, spec.size),
            spec.experts,
            method=context.scheme(pairs),
            dtype=dtype,
            device=device,
        )
        self.down = ExpertLinear(
            tuple(down),
            spec.size,
            (hidden,),
            spec.experts,
            method=context.scheme(down),
            dtype=dtype,
            device=device,
        )
        self._numbers = torch.arange(spec.experts + 1, device=device)
        self._gate = GATES[spec.activation].on(device, dtype)
        self._route, self._combine = route.on(device, dtype), combine.on(device, dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        weights, chosen = self._route(self.router(x), self.spec.top_k, self.spec.renormalize)
        experts, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(experts, self._numbers, out_int32=True)
        inner = self._gate(self.gate_up.grouped(x[order // self.spec.top_k], starts))
        return self._combine(self.down.grouped(inner, starts), weights, order)

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.gate_up.capturable and self.down.capturable

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for linear in self.linears():
            yield from linear.tensors()

    def norms(self) -> Iterator[RMSNorm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.router
        yield self.gate_up
        yield self.down

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield from ()
