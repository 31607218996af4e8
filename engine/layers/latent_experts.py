"""A mixture of experts over a narrower vector, next to an MLP for every token, as in Nemotron 3 Super."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from personae.engine.layers.block import BlockContext, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import MLP, MlpSpec
from personae.engine.layers.moe import MoE, MoeSpec
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import Weight
from personae.lora.sites import LoraSite

INTO, OUT = "fc1_latent_proj", "fc2_latent_proj"


@dataclass(frozen=True, slots=True)
class LatentExpertsSpec(UndividedSpec):
    """See `LatentExperts`. `size`: of the narrower vector. `bias`: of what makes it and what reads it."""

    kind = "experts of a narrower vector"

    sparse: MoeSpec
    shared: MlpSpec
    size: int
    bias: bool = False

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return True

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        path = self.sparse.path
        return {
            **replace(self.sparse, router_inputs=hidden_size).lora_sites(self.size),
            **self.shared.lora_sites(hidden_size),
            "latent_in": LoraSite(f"{path}.{INTO}", "latent_in", hidden_size, self.size),
            "latent_out": LoraSite(f"{path}.{OUT}", "latent_out", self.size, hidden_size),
        }

    def build(self, context: BlockContext) -> "LatentExperts":
        """See BlockSpec."""
        return LatentExperts(self, context)


class LatentExperts(UndividedBlock):
    """y = W_out experts(W_in x) + mlp(x). The router reads x."""

    kv, heads = None, 0

    def __init__(self, spec: LatentExpertsSpec, context: BlockContext) -> None:
        hidden, prefix = context.hidden_size, spec.sparse.within(context.prefix)
        self.layer = context.layer
        self.first = context.linear((f"{prefix}.{INTO}",), hidden, (spec.size,), bias=spec.bias)
        self.last = context.linear((f"{prefix}.{OUT}",), spec.size, (hidden,), bias=spec.bias)
        self.sparse = MoE(replace(spec.sparse, router_inputs=hidden), replace(context, hidden_size=spec.size))
        self.shared = MLP(spec.shared, context)

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.sparse.capturable

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        narrow = step.linear(self.first, self.layer, "latent_in", x)
        chosen = self.sparse(narrow, step, routed_by=x)
        return step.linear(self.last, self.layer, "latent_out", chosen) + self.shared(x, step)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.first.tensors()
        yield from self.last.tensors()
        yield from self.sparse.tensors()
        yield from self.shared.tensors()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.first
        yield self.last
        yield from self.sparse.linears()
        yield from self.shared.linears()

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("latent_in",), self.first
        yield ("latent_out",), self.last
        yield from self.sparse.lora_linears()
        yield from self.shared.lora_linears()
