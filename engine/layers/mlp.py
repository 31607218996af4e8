"""The gated feed-forward half of a layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.layers.linear import Linear
from personae.engine.layers.step import Step
from personae.kernels.activation import gelu_and_mul, silu_and_mul
from personae.kernels.quantized import QuantizedWeight


class MLP:
    """y = (act(x W_gate) * (x W_up)) W_down; act is SiLU, or GELU by way of tanh."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.layer = layer
        self.merged = config.merged
        self.gate = silu_and_mul if config.activation == "silu" else gelu_and_mul
        self.gate_up = Linear(hidden, (inner, inner), bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, (hidden,), bias=config.mlp_bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        inner = self.gate(step.linear(self.gate_up, self.layer, "gate_up", x))
        return step.linear(self.down, self.layer, "down", inner)

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
        """(checkpoint name, the view to fill)."""
        names = ("gate_up_proj",) if self.merged else ("gate_proj", "up_proj")
        yield from self.gate_up.tensors(*(f"{prefix}.{name}" for name in names))
        yield from self.down.tensors(f"{prefix}.down_proj")

    def linears(self) -> Iterator[Linear]:
        """The linear modules."""
        yield self.gate_up
        yield self.down
