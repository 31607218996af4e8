"""The parts of a layer: attention, MLP and any other blocks of a family.

A `BlockSpec` is data: it describes a block, and builds it. A `Block` has the parameters and computes. To add
a kind of block, write both in a file of this folder; a family then names the spec.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm, NormFactory
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.step import ForwardContext
from personae.engine.parallel.comm import ONE_RANK, Comm
from personae.engine.quantization.base import Scheme
from personae.kernels.attention import kv_width
from personae.kernels.decoder import Weight
from personae.kernels.states import windows
from personae.lora.shards import Shard
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a block keeps of every token: a key and a value for each of `heads`, with `head_dim` numbers each.

    `dtype`: None means the cache's dtype, which the server's options choose. `latent`: only keys are kept,
    and their first `latent` numbers are the values, too; 0 for a block
    without heads, which keeps one vector of each token. `state`: the shape of the float32 state before a
    window of tokens, of which a page has the last ones, see `kernels/states.py`; () for none.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype | None = None
    latent: int | None = None
    state: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """How many vectors each head keeps: a key and a value, or one for both."""
        return 2 if self.latent is None else 1

    @property
    def values(self) -> bool:
        """Whether it keeps keys and values, and not what a convolution or a state reads."""
        return self.latent != 0

    def tokens(self, page_size: int) -> int:
        """How many of a page's tokens it keeps: all, or with a state the last ones."""
        return windows(page_size)[0] * windows(page_size)[1] if self.state else page_size

    def state_bytes(self, page_size: int) -> int:
        """The bytes of a page's states."""
        return prod(self.state) * torch.float32.itemsize * windows(page_size)[0] if self.state else 0

    def page_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """The bytes of a page in a cache of that dtype."""
        return self.bytes(dtype) * self.tokens(page_size) + self.state_bytes(page_size)

    def bytes(self, dtype: torch.dtype) -> int:
        """The bytes of a token in a cache of that dtype."""
        dtype = self.dtype or dtype
        return self.parts * self.heads * kv_width(self.head_dim, dtype) * dtype.itemsize


class Block(Protocol):
    """A part of one layer, with its parameters."""

    @property
    def kv(self) -> KVSpec | None:
        """What it keeps of every token; None for nothing."""

    @property
    def heads(self) -> int:
        """The query heads that read it; 0 for a block that is no attention."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it: it does not wait for the device."""

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill) of each parameter."""

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """(checkpoint name, this rank's part) of each parameter of which it has only a part."""

    def norms(self) -> Iterator[Norm]:
        """Its norms."""

    def linears(self) -> Iterator[Linear]:
        """Its linear modules. Each is packed separately."""

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """The linear modules that adapters may change, each with its sites in the order of its outputs."""


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What a block is built with.

    `layer`: of the model, or of this stage. `caches`: what it keeps is this entry of the KV cache; the second
    is free for another block in the same half of the layer.
    `prefix`: of its layer's names in the checkpoint. `scheme`: the format of each linear module's weight.
    `rope`: makes the tables of a rotary embedding for heads of that size. `comm`: the ranks that share the
    block; its spec is this rank's part.
    """

    layer: int
    caches: tuple[int, int]
    prefix: str
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    scheme: Scheme
    norm: NormFactory
    rope: Callable[[RopeConfig, int], tuple[Tensor, Tensor]]
    comm: Comm = ONE_RANK

    def linear(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        *,
        bias: bool,
        shards: Sequence[Shard] = (),
    ) -> Linear:
        """A linear module; see `Linear`."""
        return Linear(
            names,
            inputs,
            outputs,
            bias=bias,
            method=self.scheme(names),
            dtype=self.dtype,
            device=self.device,
            shards=shards,
            comm=self.comm,
        )


class BlockSpec(Protocol):
    """Describes a block."""

    @property
    def kv(self) -> KVSpec | None:
        """What it keeps of every token; None for nothing."""

    @property
    def discrete(self) -> bool:
        """Whether it makes discrete choices, such as experts. Then a small rounding difference may become a
        large one."""

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """The linear modules that adapters may change, by short names that are unique within a layer."""

    def of_rank(self, rank: int, size: int) -> "BlockSpec":
        """What a rank of `size` has of it. Raises ValueError, which names the sizes, if it cannot be cut so.
        The ranks' results are summed."""

    def shards(self) -> Mapping[str, Shard]:
        """The rank's parts of its linear modules, by the short names of their LoRA sites, if it is one of
        several ranks."""

    def build(self, context: BlockContext) -> Block:
        """The block, with its parameters allocated."""


class UndividedSpec:
    """The part of a `BlockSpec` for a block that ranks cannot share. `kind` says what it is."""

    __slots__ = ()
    kind: ClassVar[str]

    def of_rank(self, rank: int, size: int) -> NoReturn:
        """See BlockSpec. Always raises ValueError."""
        raise ValueError(self.kind)

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        return {}


class UndividedBlock:
    """The part of a `Block` for one that ranks cannot share."""

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        return iter(())


class OfBlocks:
    """What consists of blocks has what these have, in their order."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks."""
        raise NotImplementedError

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for block in self.blocks:
            yield from block.tensors()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        for block in self.blocks:
            yield from block.norms()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        for block in self.blocks:
            yield from block.linears()

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        for block in self.blocks:
            yield from block.lora_linears()


@dataclass(frozen=True, slots=True)
class NoBlockSpec:
    """In place of a half that a layer does not have."""

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
        return {}

    def of_rank(self, rank: int, size: int) -> "NoBlockSpec":
        """See BlockSpec."""
        return self

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        return {}

    def build(self, context: BlockContext) -> "NoBlock | RemoteBlock":
        """See BlockSpec."""
        return NoBlock()


class _WithoutParameters(UndividedBlock):
    """The part of a `Block` for one that has no parameters."""

    kv, heads, capturable = None, 0, True

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from ()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield from ()

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield from ()


class NoBlock(_WithoutParameters):
    """See `NoBlockSpec`. A layer does not call it."""

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block. Always raises TypeError."""
        raise TypeError("the layer does not have this half")


@dataclass(frozen=True, slots=True)
class RemoteBlockSpec(NoBlockSpec):
    """In place of an MLP that only other ranks have parts of."""

    def build(self, context: BlockContext) -> "RemoteBlock":
        """See BlockSpec."""
        return RemoteBlock(context.comm)


class RemoteBlock(_WithoutParameters):
    """See `RemoteBlockSpec`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """The other ranks' sum for this rank's tokens. x: [0, hidden], since this rank computes nothing."""
        return self._comm.all_reduce(x)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """h += attention(norm(h)); h += mlp(norm(h)); and h += further(h), if there is a third block."""

    attention: BlockSpec
    mlp: BlockSpec
    further: BlockSpec | None = None

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its blocks, in order."""
        return (self.attention, self.mlp, *(() if self.further is None else (self.further,)))

    @property
    def shares_further(self) -> bool:
        """Whether ranks share the third block, even if each has attention of its own: it has experts."""
        return self.further is not None and self.further.discrete

    def lora_sites(self, hidden_size: int) -> dict[str, LoraSite]:
        """The sites of its blocks."""
        return {key: site for block in self.blocks for key, site in block.lora_sites(hidden_size).items()}

    def of_rank(self, rank: int, size: int, *, attention_ranks: int = 0) -> "LayerSpec":
        """See BlockSpec. `attention_ranks`: so many ranks, the first ones, have all but the MLP and experts
        whole, for their own sequences. If these are not all, the others have the MLP and nothing else."""
        if not attention_ranks:
            return LayerSpec(*(block.of_rank(rank, size) for block in self.blocks))
        if attention_ranks == size:
            further = self.further
            if further is not None and self.shares_further:
                further = further.of_rank(rank, size)
            return replace(self, mlp=self.mlp.of_rank(rank, size), further=further)
        own = self.mlp.of_rank(max(rank - attention_ranks, 0), size - attention_ranks)
        if rank >= attention_ranks:
            return LayerSpec(NoBlockSpec(), own)
        return self if isinstance(own, NoBlockSpec) else replace(self, mlp=RemoteBlockSpec())

    def shards(self) -> dict[str, Shard]:
        """See BlockSpec."""
        return {key: shard for block in self.blocks for key, shard in block.shards().items()}
