"""The feed-forward half of a layer, gated or not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.layers.block import BlockContext
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import MlpWeights, Weight
from personae.kernels.operators import gelu_and_mul, silu_and_mul, swiglu_clamped
from personae.lora.shards import INPUTS, OUTPUTS, Shard, joined
from personae.lora.sites import LoraSite

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "silu_clamped"]
GATES = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul, "silu_clamped": swiglu_clamped}
"""act(gate) * up, by the activation."""
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
"""act(x) of an MLP without a gate."""


def gate_of(
    activation: Activation, *, gated: bool, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """What makes inner vectors of the first products: act(gate) * up, or act(up) without a gate."""
    if gated:
        return GATES[activation].on(device, dtype)
    return lambda x: PLAIN[activation](x.float()).to(x.dtype)


GATED, MERGED, UNGATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """`size`: of the inner vectors. `merged`: the checkpoint has gate and up as one tensor. `gated`: False
    for down(act(up x)). `path`, `names`: the block's name in a layer, and those of its modules, None for the
    usual ones. `key` begins the short names of its LoRA sites, so that a layer may have two such blocks.
    `module`: the name of the block in PEFT, None for `path`. `scales`: of the gate before its activation, and
    of the result. `sparsity`: the part of a gate's numbers, if they were normal, that become 0 before its
    activation. `part`: of a rank's, where its inner vectors begin in those of the whole, and the size of the
    whole."""

    size: int
    activation: Activation = "silu"
    bias: bool = False
    merged: bool = False
    gated: bool = True
    path: str = "mlp"
    names: tuple[str, ...] | None = None
    key: str = ""
    module: str | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    sparsity: float = 0.0
    part: tuple[int, int] | None = None

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    @property
    def plain(self) -> bool:
        """Whether it has none of the rarer parts, so that a whole decoder in one call can have it."""
        usual = self.activation in ("silu", "silu_clamped")
        return self.gated and usual and self.scales == (1.0, 1.0) and not self.sparsity

    @property
    def modules(self) -> tuple[tuple[str, ...], str]:
        """The names of what reads the block's input, and of what reads the inner vectors."""
        *wide, narrow = self.names or (UNGATED if not self.gated else MERGED if self.merged else GATED)
        return tuple(wide), narrow

    @property
    def inner(self) -> tuple[str, ...]:
        """The short names of the LoRA sites that read the block's input."""
        return tuple(f"{self.key}{name}" for name in (("gate", "up") if self.gated else ("up",)))

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        (wide, narrow), block = self.modules, self.module or self.path
        paths = wide if len(wide) == len(self.inner) else wide * len(self.inner)
        return {
            **{
                site: LoraSite(f"{block}.{path}", f"{self.key}gate_up", hidden_size, self.size)
                for site, path in zip(self.inner, paths, strict=True)
            },
            f"{self.key}down": LoraSite(f"{block}.{narrow}", f"{self.key}down", self.size, hidden_size),
        }

    def of_rank(self, rank: int, size: int) -> "MlpSpec":
        """See BlockSpec: a part of the inner vectors."""
        if self.size % size:
            raise ValueError(f"an MLP with inner vectors of {self.size}")
        if self.sparsity:
            raise ValueError("an MLP whose gate is cut off at its mean")
        own = self.size // size
        return replace(self, size=own, part=(rank * own, self.size))

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        if self.part is None:
            return {}
        own = ((self.part[0], self.part[0] + self.size),)
        inner = {name: Shard(OUTPUTS, own) for name in self.inner}
        return {**inner, f"{self.key}down": Shard(INPUTS, own)}

    def build(self, context: BlockContext) -> "MLP":
        """See BlockSpec."""
        return MLP(self, context)


class MLP:
    """y = (act(x W_gate) * (x W_up)) W_down, or without a gate y = act(x W_up) W_down. act is computed in
    float32."""

    kv, heads, capturable = None, 0, True

    def __init__(self, spec: MlpSpec, context: BlockContext) -> None:
        hidden, inner = context.hidden_size, spec.size
        (wide, narrow), prefix = spec.modules, f"{context.prefix}.{spec.path}"
        self.spec, self.layer = spec, context.layer
        self._gate = gate_of(spec.activation, gated=spec.gated, device=context.device, dtype=context.dtype)
        self.gate_up = context.linear(
            tuple(f"{prefix}.{name}" for name in wide),
            hidden,
            (inner,) * len(spec.inner),
            bias=spec.bias,
            shards=self._inner_shards(len(wide)),
        )
        self.down = context.linear(
            (f"{prefix}.{narrow}",),
            inner,
            (hidden,),
            bias=spec.bias and context.comm.rank == 0,
            shards=[spec.shards()[f"{spec.key}down"]] if spec.part else (),
        )
        self._deviations = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        self._comm = context.comm

    def _inner_shards(self, modules: int) -> list[Shard]:
        """This rank's parts of the `modules` that read the input."""
        if self.spec.part is None:
            return []
        of = [self.spec.shards()[name] for name in self.spec.inner]
        return of if modules == len(of) else [joined(of, [self.spec.part[1]] * len(of))]

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        return self._comm.all_reduce(self.partial(x, step))

    def partial(self, x: Tensor, step: ForwardContext) -> Tensor:
        """This rank's summand of the result."""
        key = self.spec.key
        of_gate, of_result = self.spec.scales
        wide = step.linear(self.gate_up, self.layer, f"{key}gate_up", x)
        if of_gate != 1.0:
            wide[:, : self.spec.size] *= of_gate
        if self._deviations is not None:
            gate = wide[:, : self.spec.size].float()
            variance, mean = torch.var_mean(gate, -1, correction=0, keepdim=True)
            wide[:, : self.spec.size] = F.relu(gate - (mean + self._deviations * variance.sqrt()))
        y = step.linear(self.down, self.layer, f"{key}down", self._gate(wide))
        return y if of_result == 1.0 else y * of_result

    @property
    def weights(self) -> MlpWeights:
        """Its weights, for a whole decoder in one call."""
        return MlpWeights(self.gate_up.weights, self.down.weights)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        yield from self.gate_up.shards()
        yield from self.down.shards()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.gate_up
        yield self.down

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield self.spec.inner, self.gate_up
        yield (f"{self.spec.key}down",), self.down
