"""Mamba-2: a state of each head, which each token decays by its own step, adds to and reads.

Source: https://arxiv.org/abs/2405.21060. The cache keeps states, and what each token's update reads; see
`kernels/states.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.layers.block import BlockContext, KVSpec, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import Weight
from personae.kernels.operators import append_latent, selective_state
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class MambaSpec(UndividedSpec):
    """`heads` heads of `head_dim` numbers have states of `state` times as many. They share the b and c of
    `groups`. `length`: of the convolution, which has a bias with `conv_bias`. `bias`: of the linear modules.
    `limits`: of a token's step. `eps`: of the norm of results. `path`: the block's name in a layer. `norm`:
    where results have one, None for nowhere. `scales`: of the gate, x, b, c and the step."""

    kind = "Mamba-2 layers"

    heads: int
    head_dim: int
    state: int
    groups: int
    length: int
    conv_bias: bool
    bias: bool
    limits: tuple[float, float]
    eps: float
    path: str = "mamba"
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    scales: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        """The width of x, of the gate and of the results."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """The width of x, b and c together, which the convolution reads."""
        return self.inner + 2 * self.groups * self.state

    @property
    def kv(self) -> KVSpec:
        """See BlockSpec."""
        return KVSpec(1, self.mixed + self.heads, latent=0, state=(self.heads, self.state, self.head_dim))

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        outputs = self.inner + self.mixed + self.heads
        return {
            "state_in": LoraSite(f"{self.path}.in_proj", "state_in", hidden_size, outputs),
            "state_out": LoraSite(f"{self.path}.out_proj", "state_out", self.inner, hidden_size),
        }

    def build(self, context: BlockContext) -> "Mamba":
        """See BlockSpec."""
        return Mamba(self, context)


class Mamba(UndividedBlock):
    """y = W_out norm(state space(x, b, c, step) * silu(gate)); all of them are linear in the input. The norm
    is over the heads of each group. It may also stand before the gate, or nowhere."""

    heads, capturable = 0, False  # the host makes the plan of a step from its lengths

    def __init__(self, spec: MambaSpec, context: BlockContext) -> None:
        self.spec, self.kv, self.layer, self.cache = spec, spec.kv, context.layer, context.caches[0]
        self.prefix, hidden, device = f"{context.prefix}.{spec.path}", context.hidden_size, context.device
        sizes = (spec.inner + spec.mixed + spec.heads,)
        self.first = context.linear((f"{self.prefix}.in_proj",), hidden, sizes, bias=spec.bias)
        self.last = context.linear((f"{self.prefix}.out_proj",), spec.inner, (hidden,), bias=spec.bias)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.weight = empty(spec.mixed, spec.length)
        self.norm_weight = None if spec.norm is None else empty(spec.inner)
        widths = (spec.inner, spec.inner, *(spec.groups * spec.state,) * 2, spec.heads)
        self.scales: Tensor | None = None
        if set(spec.scales) != {1.0}:
            each = [scale for scale, width in zip(spec.scales, widths, strict=True) for _ in range(width)]
            self.scales = torch.tensor(each, device=device)
        self.bias = empty(spec.mixed) if spec.conv_bias else None
        self.decay, self.dt_bias, self.skip = empty(spec.heads), empty(spec.heads), empty(spec.heads)
        self._append = append_latent.on(device, context.dtype)
        self._scan = selective_state.on(device, context.dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        spec, cache, plan = self.spec, step.caches[self.cache][0], step.state_plan
        assert plan is not None
        whole = step.linear(self.first, self.layer, "state_in", x)
        if self.scales is not None:
            whole = (whole * self.scales).to(x.dtype)
        gate, kept = torch.split(whole, [spec.inner, spec.mixed + spec.heads], -1)
        found = self._scan(
            kept,
            cache,
            step.states[self.cache],
            plan,
            self.weight,
            self.bias,
            self.decay,
            self.dt_bias,
            self.skip,
            spec.groups,
            spec.limits,
        )
        self._append(kept[plan.newest].unsqueeze(1), cache, plan.places)
        y, gate = found.flatten(1), F.silu(gate.float())
        y = self._normed(y) * gate if spec.norm == "before_gate" else self._normed(y * gate)
        return step.linear(self.last, self.layer, "state_out", y.to(x.dtype))

    def _normed(self, y: Tensor) -> Tensor:
        """[T, inner] float32 -> the same with the norm."""
        if self.norm_weight is None:
            return y
        parts = y.view(len(y), self.spec.groups, -1)
        scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.spec.eps)
        return (parts * scale).flatten(1) * self.norm_weight

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.first.tensors()
        yield from self.last.tensors()
        yield f"{self.prefix}.conv1d.weight", self.weight.unsqueeze(1)
        if self.bias is not None:
            yield f"{self.prefix}.conv1d.bias", self.bias
        yield f"{self.prefix}.A_log", self.decay
        yield f"{self.prefix}.dt_bias", self.dt_bias
        yield f"{self.prefix}.D", self.skip
        if self.norm_weight is not None:
            yield f"{self.prefix}.norm.weight", self.norm_weight

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.first
        yield self.last

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("state_in",), self.first
        yield ("state_out",), self.last
