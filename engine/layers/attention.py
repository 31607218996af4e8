"""Self-attention of one layer, over the paged cache."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext, KVSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.step import ForwardContext
from personae.kernels.attention import ScoreChange
from personae.kernels.decoder import Weight
from personae.kernels.operators import append_kv, rotary
from personae.lora.shards import INPUTS, OUTPUTS, Shard, joined
from personae.lora.sites import LoraSite, sites

QkNorm = Literal["head", "all"]  # over each head, or over all heads of a token together


def halves_first(dim: int, device: torch.device, turned: int | None = None) -> Tensor:
    """The order [dim] in which the first numbers of neighbouring pairs come before the second ones. Pairs are
    among the first `turned` numbers, None for all."""
    turned = dim if turned is None else turned
    order = torch.arange(dim)
    order[:turned] = torch.arange(turned).view(-1, 2).T.flatten()
    return order.to(device)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """`heads` query heads share `kv_heads` keys and values.

    `window`: a query sees itself and the `window - 1` tokens before it; None for all. `rope`: None for a
    layer without rotary embedding. `scale`: of scores, None means 1 / sqrt(head_dim). `merged`: the
    checkpoint has q, k and v as one tensor. `inputs`: the width of the input, None means the hidden size.
    `softcap`: scores s become softcap * tanh(s / softcap). `sinks`: each head has a learned score of a key
    without a value. `chunk`: positions are in chunks of that many tokens, and a query sees only its own
    chunk. `normed_after_rope`: where `qk_norm` stands. `position_scale`: (beta, length, first), q is
    multiplied by 1 + beta ln(1 + floor((position + first) / length)). `gated`: q has a gate behind each head,
    whose sigmoid weighs the head's result. `output`, `norms`: names in the checkpoint; no `norms` for norms
    without weights. `value_norm`: so are values, each head, without weights. `keys_as_values`: values are
    keys before their norm and rotary embedding. `reads`: the layer whose keys and values it reads, as it has
    none. `path`: the block's name in a layer. `key` begins the short names of its LoRA sites, so that layers
    may have different shapes. `part`: of a rank's, the first query head, the first key and value head, and
    the spec of the whole.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    scale: float | None = None
    merged: bool = False
    inputs: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    normed_after_rope: bool = False
    position_scale: tuple[float, int, int] | None = None
    gated: bool = False
    output: str = "o_proj"
    norms: tuple[str, str] | None = ("q_norm", "k_norm")
    value_norm: bool = False
    keys_as_values: bool = False
    reads: int | None = None
    path: str = "self_attn"
    key: str = ""
    part: "tuple[int, int, AttentionSpec] | None" = None

    @property
    def kv(self) -> KVSpec | None:
        """See BlockSpec."""
        return None if self.reads is not None else self.read

    @property
    def read(self) -> KVSpec:
        """What it reads of every token."""
        return KVSpec(self.kv_heads, self.head_dim)

    @property
    def projected(self) -> str:
        """Which of q, k and v it computes from the input."""
        return "q" if self.reads is not None else "qk" if self.keys_as_values else "qkv"

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of what is projected: q, with the gate, k and v."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (queries * (1 + self.gated), keys, keys)[: len(self.projected)]

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    @property
    def plain(self) -> bool:
        """Whether it has none of the rarer parts, so that a whole decoder in one call can have it."""
        rare = self.scale is not None or self.softcap is not None
        turned = self.rope is not None and self.rope.interleaved
        changed = self.normed_after_rope or self.position_scale is not None or self.gated
        other = self.chunk is not None or self.value_norm or self.projected != "qkv"
        return not (rare or turned or changed or other)

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        sizes = {key: (hidden_size, width) for key, width in zip(self.projected, self.widths, strict=True)}
        found = sites({**sizes, "o": (self.heads * self.head_dim, hidden_size)}, merged=self.merged)
        found["o"] = replace(found["o"], path=f"self_attn.{self.output}")
        return {
            f"{self.key}{name}": replace(
                site,
                path=site.path.replace("self_attn", self.path, 1),
                group=f"{self.key}{site.group}",
            )
            for name, site in found.items()
        }

    def of_rank(self, rank: int, size: int) -> "AttentionSpec":
        """See BlockSpec: some of the heads. Where there are fewer keys and values than ranks, several ranks
        have the same."""
        if self.heads % size:
            raise ValueError(f"{self.heads} attention heads")
        if self.kv_heads % size and size % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key and value heads")
        if self.qk_norm == "all":
            raise ValueError("attention that normalises all heads together")
        if self.gated:
            raise ValueError("gated attention")

        own = max(self.kv_heads // size, 1)
        first = rank * self.heads // size, rank * self.kv_heads // size
        return replace(self, heads=self.heads // size, kv_heads=own, part=(*first, self))

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        if self.part is None:
            return {}
        first, first_kv, dim = self.part[0], self.part[1], self.head_dim
        query = (first * dim, (first + self.heads) * dim)
        kv = (first_kv * dim, (first_kv + self.kv_heads) * dim)
        ranges = (query, kv, kv)[: len(self.projected)]
        outputs = {key: Shard(OUTPUTS, (own,)) for key, own in zip(self.projected, ranges, strict=True)}
        return {f"{self.key}{name}": part for name, part in {**outputs, "o": Shard(INPUTS, (query,))}.items()}

    def build(self, context: BlockContext) -> "Attention":
        """See BlockSpec."""
        return Attention(self, context)


class Attention:
    """q, k, v = x W_qkv. The heads are rotated, k and v are appended to the cache, and attention's result is
    multiplied by W_o."""

    def __init__(self, spec: AttentionSpec, context: BlockContext) -> None:
        device, dtype = context.device, context.dtype
        names = ("qkv",) if spec.merged else tuple(spec.projected)
        self.prefix = f"{context.prefix}.{spec.path}"
        self.spec, self.layer = spec, context.layer
        self.source = context.layer if spec.reads is None else spec.reads
        self.kv, self.heads, self.sizes = spec.kv, spec.heads, list(spec.widths)
        self.scale = spec.scale or spec.head_dim**-0.5
        self.rope = context.rope(spec.rope, spec.head_dim) if spec.rope else None
        qkv = tuple(f"{self.prefix}.{name}_proj" for name in names)
        self._comm = context.comm
        inner, outer = self._shards()
        self.qkv = context.linear(
            qkv, spec.inputs or context.hidden_size, spec.widths, bias=spec.qkv_bias, shards=inner
        )
        self.o = context.linear(
            (f"{self.prefix}.{spec.output}",),
            spec.heads * spec.head_dim,
            (context.hidden_size,),
            bias=spec.o_bias and context.comm.rank == 0,
            shards=outer,
        )
        self.qk_norms: tuple[Norm, Norm] | None = None
        if spec.qk_norm is not None:
            q, k = (spec.head_dim,) * 2 if spec.qk_norm == "head" else spec.widths[:2]
            self.qk_norms = context.norm(q), context.norm(k)
            if spec.norms is None:
                for norm in self.qk_norms:
                    norm.weight.fill_(1.0)
        self.value_norm = context.norm(spec.head_dim) if spec.value_norm else None
        if self.value_norm is not None:
            self.value_norm.weight.fill_(1.0)
        self.sinks = torch.empty(spec.heads, dtype=torch.float32, device=device) if spec.sinks else None
        chunk = spec.chunk
        if chunk is not None and self.rope is not None and len(self.rope[0]) <= chunk:
            chunk = None  # no context that is served has a second chunk
        changed = spec.softcap or spec.sinks or chunk
        self.scores = ScoreChange(spec.softcap, self.sinks, chunk) if changed else None
        self.capturable = self.scores is None  # the plain attention asks the device for lengths
        self._halves: Tensor | None = None  # the dimensions in the order of pairs' first and second halves
        if spec.rope is not None and spec.rope.interleaved:
            self._halves = halves_first(spec.head_dim, device, int(spec.head_dim * spec.rope.share))
        self._rotary, self._append_kv = rotary.on(device, dtype), append_kv.on(device, dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        cache, attend = step.caches[self.source], step.attend[self.layer]
        whole = step.linear(self.qkv, self.layer, f"{self.spec.key}qkv", x)
        q, *others = torch.split(whole, self.sizes, dim=-1)
        if self.spec.reads is None:
            k, v = others[0], others[-1]
        else:  # it has no keys of its own; nothing reads these, which the lines below change
            k = v = q.new_zeros(len(q), self.spec.kv_heads * self.spec.head_dim)
        gate: Tensor | None = None
        if self.spec.gated:
            q, gate = (part.flatten(1) for part in q.view(x.shape[0], self.heads, -1).chunk(2, -1))
        if self.qk_norms is not None and not self.spec.normed_after_rope:
            q, k = self._normed(q, k)
        q, k, v = (part.view(x.shape[0], -1, self.spec.head_dim) for part in (q, k, v))
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.rope is not None:
            cos, sin = self.rope
            turned = 2 * cos.shape[1]
            if self._halves is not None:  # scores do not depend on the order of the dimensions
                q, k = q[..., self._halves], k[..., self._halves]
            self._rotary(q[..., :turned], k[..., :turned], step.positions, cos, sin)
        if self.qk_norms is not None and self.spec.normed_after_rope:
            q, k = (part.view(x.shape[0], -1, self.spec.head_dim) for part in self._normed(q, k))
        if self.spec.position_scale is not None:
            beta, length, first = self.spec.position_scale
            far = 1 + beta * torch.log1p(((step.positions + first) // length).float())
            q = (q * far.view(-1, 1, 1)).to(q.dtype)
        if self.spec.reads is None:
            self._append_kv(k, v, *cache, step.batch.write_index)
        mixed = attend(q, *cache, self.scale, self.spec.window).flatten(1)
        if gate is not None:
            mixed *= torch.sigmoid(gate)
        return self._comm.all_reduce(step.linear(self.o, self.layer, f"{self.spec.key}o", mixed))

    def _shards(self) -> tuple[list[Shard], list[Shard]]:
        """This rank's parts of the weights that read the input, and of the output's."""
        if self.spec.part is None:
            return [], []
        of = self.spec.shards()
        key = self.spec.key
        inner, outer = [of[f"{key}{name}"] for name in self.spec.projected], [of[f"{key}o"]]
        return [joined(inner, list(self.spec.part[2].widths))] if self.spec.merged else inner, outer

    @property
    def _norms(self) -> int:
        """How many of the norms of q and k the checkpoint has."""
        return 2 if self.spec.reads is None else 1

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k normalised, [T, width]: each head alone, or all heads together."""
        assert self.qk_norms is not None
        q, k = (
            norm(part.reshape(len(part), -1, norm.width)).flatten(1)
            for norm, part in zip(self.qk_norms, (q, k), strict=True)
        )
        return q, k

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        if self.qk_norms is not None and self.spec.norms is not None:
            for name, norm in list(zip(self.spec.norms, self.qk_norms, strict=True))[: self._norms]:
                yield from norm.tensors(f"{self.prefix}.{name}")
        if self.sinks is not None:
            yield f"{self.prefix}.sinks", self.sinks

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        yield from self.qkv.shards()
        yield from self.o.shards()
        if self.sinks is not None and self.spec.part is not None:
            first = self.spec.part[0]
            yield f"{self.prefix}.sinks", Shard(OUTPUTS, ((first, first + self.heads),))

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        if self.qk_norms is not None and self.spec.norms is not None:
            yield from self.qk_norms[: self._norms]

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.qkv
        yield self.o

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        key = self.spec.key
        yield tuple(f"{key}{name}" for name in self.spec.projected), self.qkv
        yield (f"{key}o",), self.o
