"""The parts of a layer: attention, MLP and whatever else a family is made of.

A `BlockSpec` is data: it says what a block is, and builds it. A `Block` has the parameters and computes. To
add a kind of block: write both in a file of this folder; a family then names the spec.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import Scheme
from personae.kernels.decoder import Weight
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a block keeps of every token: a key and a value for each of `heads`, of `head_dim` numbers each.

    `dtype`: None means that of the cache, which the server's options choose.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """What a token takes in a cache of that dtype."""
        return 2 * self.heads * self.head_dim * (self.dtype or dtype).itemsize


class Block(Protocol):
    """A part of one layer, with its parameters."""

    @property
    def kv(self) -> KVSpec | None:
        """What it keeps of every token."""

    @property
    def heads(self) -> int:
        """Query heads that read what it keeps."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold it: it asks the device for nothing."""

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill)."""

    def norms(self) -> Iterator[RMSNorm]:
        """Its norms."""

    def linears(self) -> Iterator[Linear]:
        """Its linear modules, each of which is laid out by itself."""

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """Those that adapters may change, with the sites whose outputs they have, in their order."""


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What a block is built with.

    `prefix`: of its layer's names in the checkpoint. `scheme`: in which format each linear module's weight is
    kept. `rope`: the tables of a rotary embedding for heads of that size.
    """

    layer: int
    prefix: str
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    scheme: Scheme
    norm: Callable[[int], RMSNorm]
    rope: Callable[[RopeConfig, int], tuple[Tensor, Tensor]]

    def linear(self, names: tuple[str, ...], inputs: int, outputs: tuple[int, ...], *, bias: bool) -> Linear:
        """A linear module; see `Linear`."""
        method = self.scheme(names)
        return Linear(names, inputs, outputs, bias=bias, method=method, dtype=self.dtype, device=self.device)


class BlockSpec(Protocol):
    """What a block is."""

    @property
    def kv(self) -> KVSpec | None:
        """What it keeps of every token; None for nothing."""

    @property
    def discrete(self) -> bool:
        """Whether it chooses by what it computes, so that a difference of rounding may become a large one."""

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """The linear modules that adapters may change, by short names that no other block of a layer has."""

    def build(self, context: BlockContext) -> Block:
        """The block, its parameters allocated."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """h += attention(norm(h)); h += mlp(norm(h))."""

    attention: BlockSpec
    mlp: BlockSpec

    def lora_sites(self, hidden_size: int) -> dict[str, LoraSite]:
        """Those of its blocks."""
        return {**self.attention.lora_sites(hidden_size), **self.mlp.lora_sites(hidden_size)}
