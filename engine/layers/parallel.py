"""Two blocks that read the same input, and whose results are summed: attention and Mamba-2 in Falcon-H1."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from personae.engine.layers.block import (
    Block,
    BlockContext,
    BlockSpec,
    KVSpec,
    OfBlocks,
    UndividedBlock,
    UndividedSpec,
)
from personae.engine.layers.step import ForwardContext
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class ParallelSpec(UndividedSpec):
    """y = outputs[0] * first(inputs[0] * x) + outputs[1] * second(inputs[1] * x)."""

    kind = "two blocks in parallel"

    first: BlockSpec
    second: BlockSpec
    inputs: tuple[float, float] = (1.0, 1.0)
    outputs: tuple[float, float] = (1.0, 1.0)

    @property
    def kv(self) -> KVSpec | None:
        """See BlockSpec. What the second block keeps is `second.kv`."""
        return self.first.kv

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return self.first.discrete or self.second.discrete

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        return {**self.first.lora_sites(hidden_size), **self.second.lora_sites(hidden_size)}

    def build(self, context: BlockContext) -> "Parallel":
        """See BlockSpec."""
        return Parallel(self, context)


def side_by_side(block: BlockSpec) -> tuple[BlockSpec, ...]:
    """The two blocks of a `ParallelSpec`; of another one, itself."""
    return (block.first, block.second) if isinstance(block, ParallelSpec) else (block,)


class Parallel(OfBlocks, UndividedBlock):
    """See `ParallelSpec`."""

    def __init__(self, spec: ParallelSpec, context: BlockContext) -> None:
        self.spec = spec
        self.first = spec.first.build(context)
        self.second = spec.second.build(replace(context, caches=context.caches[::-1]))
        self.kv, self.heads = self.first.kv, self.first.heads

    @property
    def blocks(self) -> tuple[Block, Block]:
        """The two of them."""
        return self.first, self.second

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.first.capturable and self.second.capturable

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        first, second = (
            block(x if into == 1.0 else x * into, step) * out
            for block, into, out in zip(self.blocks, self.spec.inputs, self.spec.outputs, strict=True)
        )
        return first + second
