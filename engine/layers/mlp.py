"""The gated feed-forward half of a layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from personae.engine.layers.block import BlockContext
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.step import ForwardContext
from personae.kernels.activation import gelu_and_mul, silu_and_mul
from personae.kernels.decoder import Weight
from personae.lora.sites import LoraSite, sites

Activation = Literal["silu", "gelu_tanh"]
GATES = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """`size`: of the inner vectors. `merged`: the checkpoint has gate and up as one tensor."""

    size: int
    activation: Activation = "silu"
    bias: bool = False
    merged: bool = False

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        wide, narrow = (hidden_size, self.size), (self.size, hidden_size)
        return sites({"gate": wide, "up": wide, "down": narrow}, merged=self.merged)

    def build(self, context: BlockContext) -> "MLP":
        """See BlockSpec."""
        return MLP(self, context)


class MLP:
    """y = (act(x W_gate) * (x W_up)) W_down. act is SiLU, or GELU in its tanh form."""

    kv, heads, capturable = None, 0, True

    def __init__(self, spec: MlpSpec, context: BlockContext) -> None:
        hidden, inner, prefix = context.hidden_size, spec.size, f"{context.prefix}.mlp"
        names = ("gate_up_proj",) if spec.merged else ("gate_proj", "up_proj")
        self.spec, self.layer = spec, context.layer
        self._gate = GATES[spec.activation].on(context.device, context.dtype)
        gate_up = tuple(f"{prefix}.{name}" for name in names)
        self.gate_up = context.linear(gate_up, hidden, (inner, inner), bias=spec.bias)
        self.down = context.linear((f"{prefix}.down_proj",), inner, (hidden,), bias=spec.bias)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        inner = self._gate(step.linear(self.gate_up, self.layer, "gate_up", x))
        return step.linear(self.down, self.layer, "down", inner)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()

    def norms(self) -> Iterator[RMSNorm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.gate_up
        yield self.down

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("gate", "up"), self.gate_up
        yield ("down",), self.down
