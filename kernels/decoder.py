"""A whole forward pass in one call, if the device's backend has one. Otherwise the layers run one by one.

The backend takes the weights over and packs them in its own layout. The caller's tensors may be freed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.moe import Routing
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.registry import optional
from personae.kernels.sgmv import RankTable, WorkList

Weight = Tensor | QuantizedWeight
"""The weight of a linear module: [outputs, inputs]."""
MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The modules of a layer that adapters may change in a forward pass in one call."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """y = x weight^T + bias. weight: [outputs, inputs]; merged modules follow one another."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """down(act(gate x) * up x). gate_up: gate, up merged."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Experts, of which each token uses some, as `routing` says. `router`: weight [experts, hidden]. `mlps`:
    the experts, of one shape and format. `correction`: [experts] float32, the bias of the
    choice, None for none. `shared_gate`: weight [1, hidden] of what weighs the layer's MLP, by a sigmoid;
    None if nothing does."""

    router: LinearWeights
    mlps: tuple[MlpWeights, ...]
    routing: Routing
    correction: Tensor | None
    shared_gate: LinearWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32. qkv: q, k, v merged. `qk_norms`: over each head, or over all. `mlp`: of
    all tokens, None if there are only experts. `clamped`: the activation is that of `swiglu_clamped`, else
    that of `silu_and_mul` (`kernels/reference.py`). `window`: None for full attention. `rope`: cos and sin,
    each [positions, pairs] float32; None if nothing is rotated. `sinks`: [heads] float32, each head's score
    of a key without a value; None for none."""

    attention_norm: Tensor
    qkv: LinearWeights
    qk_norms: tuple[Tensor, Tensor] | None
    o: LinearWeights
    mlp_norm: Tensor
    mlp: MlpWeights | None
    experts: ExpertsWeights | None
    clamped: bool
    window: int | None
    rope: tuple[Tensor, Tensor] | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder, see `engine/models/decoder.py`. `dtype`: of activations. `embedding`: may be
    `output` itself. `layers` may make each layer's weights anew whenever it is iterated over. `rank`: that of
    several that share each layer, whose parts of it these are."""

    dtype: torch.dtype
    embedding: Weight
    layers: Iterable[LayerWeights]
    norm: Tensor
    output: Weight
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LoraStack:
    """A module's weight pools of all layers: a [layers, rows, in], b [layers, rows, out]; see
    `kernels/sgmv.py`."""

    a: Tensor
    b: Tensor
    table: RankTable


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The adapters of one step, which change `MODULES`. stacks: by module, if the model has the module."""

    stacks: Mapping[str, LoraStack]
    work: WorkList


@dataclass(frozen=True, slots=True)
class RankSums:
    """Where several ranks, processes of one machine, add up what each has computed of o and down. `memory`:
    uint8, with zeros at first, which all have mapped and use for nothing else. `ranks`: how many they are.
    `check` is called regularly while one waits for others; it raises an error if another has ended."""

    memory: Tensor
    ranks: int
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Tapped:
    """The residual stream within a forward pass. `layers`: it is kept as it enters these layers, ascending;
    the number of layers means as it leaves the last. `values`: [T, len(layers), H] float32, which the pass
    fills."""

    layers: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How a backend packs a decoder's linear modules. `bytes`: of all of them together. `name`: what besides
    the weights decides these bytes."""

    bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a decoder's packed linear modules lie: `memory` [bytes of the layout] uint8, at a multiple of 64
    bytes. It has zeros, or, if `filled`, the packed modules of the same weights."""

    memory: Tensor
    filled: bool


class PackedLinear(Protocol):
    """A linear module whose weight is in the backend's layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, outputs]."""

    def plain(self) -> Tensor:
        """The weight as it was given, [outputs, inputs]: a copy, in bfloat16 if it was quantized."""


LayerPacked = Callable[[int, tuple[PackedLinear, ...]], None]
"""Gets a layer's number and its linear modules, as soon as they are packed, for running the layers one by
one: qkv, o; the router, each expert's gate_up, each expert's down; gate_up, down; the shared gate."""


class FusedDecoder(Protocol):
    """The weights that a backend has taken over. One thread at a time uses it."""

    @property
    def output(self) -> PackedLinear:
        """The output matrix."""

    @property
    def embedding(self) -> PackedLinear | None:
        """The embedding; None if it was not quantized."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        lora: LoraStep | None,
        overlap: Callable[[], None] | None = None,
        tapped: Tapped | None = None,
        sums: RankSums | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions: [T] int64; cache: [layers, 2, pages, kv_heads, page_size, D] -> [T, H] float32.

        Appends the tokens' keys and values, and fills `tapped`. The bits of a row do not depend on the other
        rows. This thread calls `overlap` while other threads compute; its exception is raised at the end.
        Ranks that share the layers have `sums`, and `inputs`: the embedded tokens [T, H] bfloat16. All of
        them call this with the same tokens, and get the same bits.
        """

    def adds_up(self, count: int, sums: RankSums) -> bool:
        """Whether `sums` have room for a step of `count` tokens."""

    def logits(self, hidden: Tensor, logit_mask: Tensor | None = None) -> Tensor:
        """Rows of `forward`'s result [S, H] -> [S, V] float32, in memory that the next call overwrites.

        logit_mask: a bitmask [S, ceil(V / 32)] int32. If a word is 0, the row's 32 logits may have any value:
        they are not computed, unless many rows need them.
        """


def packed_layout(weights: DecoderWeights) -> PackedLayout | None:
    """How the backend would pack these weights, of which it reads only the shapes. None if `fuse` would
    return None."""
    backend = optional("packed_layout", weights.embedding.device, weights.dtype)
    layout: PackedLayout | None = None if backend is None else backend(weights)
    return layout


def fuse(weights: DecoderWeights, place: PackedPlace | None, packed: LayerPacked) -> FusedDecoder | None:
    """Hands the weights to the backend of their device. None, with nothing changed, if it does not support
    the shape or dtype. `place`: where they are packed, or were; None for memory of the backend's own."""
    backend = optional("fuse", weights.embedding.device, weights.dtype)
    fused: FusedDecoder | None = None if backend is None else backend(weights, place, packed)
    return fused


def pack_linear(linear: LinearWeights, dtype: torch.dtype) -> PackedLinear | None:
    """Hands a weight to the backend of its device, for products with activations of `dtype`. None if the
    backend does not support it. In such a product the bits of a row do not depend on the other rows."""
    backend = optional("pack_linear", linear.weight.device, dtype)
    packed: PackedLinear | None = None if backend is None else backend(linear, dtype)
    return packed


GroupedLinear = Callable[[Tensor, Sequence[PackedLinear], Sequence[int]], Tensor]
"""(x [N, inputs], packed weights of one shape, counts) -> [N, outputs]: the first counts[0] rows of x times
the first weight, and so on, without biases. The bits are those of each weight's own product."""


Lookup = Callable[[PackedLinear, Tensor], Tensor]
"""(a packed quantized weight, outputs [T] int64) -> their rows [T, inputs], as `PackedLinear.plain` has
them."""


def lookup(device: torch.device, dtype: torch.dtype) -> Lookup | None:
    """Rows of weights that the backend packed; None if it has no such operator."""
    return optional("lookup", device, dtype)


def grouped_linear(device: torch.device, dtype: torch.dtype) -> GroupedLinear | None:
    """All products in one call, by the backend that packed the weights; None if it has no such operator."""
    return optional("grouped_linear", device, dtype)
