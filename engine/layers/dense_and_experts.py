"""An MLP for every token and a mixture of experts in one half of a layer, each with norms of its own, as in
Gemma 4."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from personae.engine.layers.block import BlockContext, LayerSpec, UndividedBlock, UndividedSpec
from personae.engine.layers.latent_experts import LatentExpertsSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import MLP, MlpSpec
from personae.engine.layers.moe import MoE, MoeSpec
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import Weight
from personae.lora.sites import LoraSite

NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class DenseAndExpertsSpec(UndividedSpec):
    """See `DenseAndExperts`."""

    kind = "an MLP next to experts"

    dense: MlpSpec
    sparse: MoeSpec

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
        return {**self.dense.lora_sites(hidden_size), **self.sparse.lora_sites(hidden_size)}

    def build(self, context: BlockContext) -> "DenseAndExperts":
        """See BlockSpec."""
        return DenseAndExperts(self, context)


class DenseAndExperts(UndividedBlock):
    """y = n5(n2(mlp(n1(x))) + n4(experts(n3(x)))), with the norms n1 to n5. The router reads x itself."""

    kv, heads = None, 0

    def __init__(self, spec: DenseAndExpertsSpec, context: BlockContext) -> None:
        self._prefix = context.prefix
        self.dense, self.sparse = MLP(spec.dense, context), MoE(spec.sparse, context)
        self._norms = [context.norm(context.hidden_size) for _ in NORMS]

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        before, after, before_experts, after_experts, last = self._norms
        dense = after(self.dense(before(x), step))
        sparse = after_experts(self.sparse(before_experts(x), step, routed_by=x))
        return last(dense + sparse)

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.sparse.capturable

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.dense.tensors()
        yield from self.sparse.tensors()
        for name, norm in zip(NORMS, self._norms, strict=True):
            yield from norm.tensors(f"{self._prefix}.{name}")

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from self._norms

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield from self.dense.linears()
        yield from self.sparse.linears()

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield from self.dense.lora_linears()
        yield from self.sparse.lora_linears()


def experts_of(layer: LayerSpec) -> MoeSpec | None:
    """The layer's mixture of experts; None if it has none."""
    for block in layer.blocks:
        if isinstance(block, DenseAndExpertsSpec | LatentExpertsSpec):
            return block.sparse
        if isinstance(block, MoeSpec):
            return block
    return None
