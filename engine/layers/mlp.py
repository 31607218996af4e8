"""The gated feed-forward half of a layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.layers.linear import Linear, MakeLinear
from personae.engine.layers.step import ForwardContext
from personae.kernels.activation import gelu_and_mul, silu_and_mul
from personae.kernels.decoder import Weight


class MLP:
    """y = (act(x W_gate) * (x W_up)) W_down; act is SiLU, or GELU by way of tanh."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        prefix: str,
        make: MakeLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = ("gate_up_proj",) if config.merged else ("gate_proj", "up_proj")
        self.layer = layer
        self.gate = (silu_and_mul if config.activation == "silu" else gelu_and_mul).on(device, dtype)
        gate_up = tuple(f"{prefix}.{name}" for name in names)
        self.gate_up = make(gate_up, hidden, (inner, inner), bias=config.mlp_bias)
        self.down = make((f"{prefix}.down_proj",), inner, (hidden,), bias=config.mlp_bias)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        inner = self.gate(step.linear(self.gate_up, self.layer, "gate_up", x))
        return step.linear(self.down, self.layer, "down", inner)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill)."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()

    def linears(self) -> Iterator[Linear]:
        """The linear modules."""
        yield self.gate_up
        yield self.down
