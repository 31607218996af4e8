"""Multi-head latent attention (MLA): a token keeps one latent vector for all heads, and one rotated key.

Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.layers.attention import halves_first
from personae.engine.layers.block import BlockContext, KVSpec, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm, RMSNorm
from personae.engine.layers.rotary import RopeConfig, score_scale
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.unquantized import Unquantized
from personae.kernels.decoder import Weight
from personae.kernels.latent_attention import LatentPlan, LatentRow
from personae.kernels.operators import append_latent, latent_attention, rotary
from personae.kernels.reference_latent import MOST_NUMBERS, prompt_attention
from personae.lora.context import LoraContext
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(UndividedSpec):
    """`heads` heads, each with a key of `plain_dim` numbers without and `rope_dim` with rotary embedding, and
    a value of `value_dim`. `latent`: the width of what keys and values are computed from. `query_latent`: the
    same of queries, None if they are computed from x. `bias`: of the modules that read x (but q_proj) and of
    o. `eps`: of the norms of latent vectors. `position_scale`: see AttentionSpec.
    """

    kind = "latent attention"

    heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    latent: int
    rope: RopeConfig
    query_latent: int | None = None
    bias: bool = False
    eps: float = 1e-6
    position_scale: tuple[float, int, int] | None = None

    @property
    def kv(self) -> KVSpec:
        """See BlockSpec."""
        return KVSpec(1, self.latent + self.rope_dim, latent=self.latent)

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    @property
    def scale(self) -> float:
        """Of scores."""
        return score_scale(self.rope) / math.sqrt(self.plain_dim + self.rope_dim)

    @property
    def modules(self) -> dict[str, tuple[str, int, int]]:
        """The linear modules that do not read x, and q without a latent: name, inputs, outputs."""
        queries = self.heads * (self.plain_dim + self.rope_dim)
        values = self.heads * (self.plain_dim + self.value_dim)
        found = {} if self.query_latent is None else {"q_b": ("q_b_proj", self.query_latent, queries)}
        return found | {"kv_b": ("kv_b_proj", self.latent, values)}

    @property
    def first(self) -> tuple[str, str, int]:
        """The module that reads x for queries: short name, name, outputs."""
        if self.query_latent is None:
            return "q", "q_proj", self.heads * (self.plain_dim + self.rope_dim)
        return "q_a", "q_a_proj", self.query_latent

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        key, name, outputs = self.first
        sizes = {
            key: (name, hidden_size, outputs),
            "kv_a": ("kv_a_proj_with_mqa", hidden_size, self.latent + self.rope_dim),
            **self.modules,
            "o": ("o_proj", self.heads * self.value_dim, hidden_size),
        }
        return {
            key: LoraSite(f"self_attn.{name}", key, inputs, outputs, reads_cache=key == "kv_b")
            for key, (name, inputs, outputs) in sizes.items()
        }

    def build(self, context: BlockContext) -> "LatentAttention":
        """See BlockSpec."""
        return LatentAttention(self, context)


class LatentAttention(UndividedBlock):
    """q = W_qb norm(W_qa x), (c, k_r) = W_kva x, (k_h, v_h) = W_kvb,h norm(c) of each head h.

    The cache has norm(c) and the rotated k_r. W_kvb is absorbed: q_h . (K_h c) = (K_h^T q_h) . c, and the sum
    of V_h c_j with weights w_j is V_h times that of the c_j. So keys and values are computed only for prompts
    (`LatentPlan`).
    """

    capturable = False  # a step is planned on the host from lengths

    def __init__(self, spec: LatentAttentionSpec, context: BlockContext) -> None:
        dtype, device, hidden = context.dtype, context.device, context.hidden_size
        self.prefix = f"{context.prefix}.self_attn"
        self.spec, self.layer = spec, context.layer
        self.kv, self.heads, self.scale = spec.kv, spec.heads, spec.scale

        def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
            return context.linear((f"{self.prefix}.{name}",), inputs, (outputs,), bias=bias)

        def norm(size: int) -> Norm:
            return RMSNorm(size, spec.eps, dtype=dtype, device=device)

        self._key, name, outputs = spec.first
        self.first = linear(name, hidden, outputs, bias=spec.bias and spec.query_latent is not None)
        self.q_b = self.q_norm = None
        if spec.query_latent is not None:
            self.q_b, self.q_norm = linear(*spec.modules["q_b"]), norm(spec.query_latent)
        self.kv_a = linear("kv_a_proj_with_mqa", hidden, spec.latent + spec.rope_dim, bias=spec.bias)
        self.kv_norm = norm(spec.latent)
        name, inputs, outputs = spec.modules["kv_b"]
        # It is never multiplied as a whole, so no format and no packed form has it.
        self.kv_b = Linear(
            (f"{self.prefix}.{name}",),
            inputs,
            (outputs,),
            bias=False,
            method=Unquantized,
            dtype=dtype,
            device=device,
        )
        self.o = linear("o_proj", spec.heads * spec.value_dim, hidden, bias=spec.bias)
        self._cos, self._sin = context.rope(spec.rope, spec.rope_dim)
        self._halves = halves_first(spec.rope_dim, device) if spec.rope.interleaved else None
        self._rotary, self._append = rotary.on(device, dtype), append_latent.on(device, dtype)
        self._attention = latent_attention.on(device, dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        spec, (cache, _), plan = self.spec, step.caches[self.layer], step.latent_plan
        assert plan is not None
        q = step.linear(self.first, self.layer, self._key, x)
        if self.q_b is not None and self.q_norm is not None:
            q = step.linear(self.q_b, self.layer, "q_b", self.q_norm(q))
        plain, turned = torch.split(q.view(len(x), spec.heads, -1), [spec.plain_dim, spec.rope_dim], -1)
        kv = step.linear(self.kv_a, self.layer, "kv_a", x)
        latent, key = torch.split(kv, [spec.latent, spec.rope_dim], -1)
        if self._halves is not None:  # scores do not depend on the order of the dimensions
            turned, key = turned[..., self._halves], key[..., self._halves]
        kept = torch.cat((self.kv_norm(latent), key), -1).unsqueeze(1)
        self._rotary(turned, kept[..., spec.latent :], step.positions, self._cos, self._sin)
        if spec.position_scale is not None:
            beta, length, first = spec.position_scale
            far = (1 + beta * torch.log1p(((step.positions + first) // length).float())).view(-1, 1, 1)
            plain, turned = ((part * far).to(x.dtype) for part in (plain, turned))
        self._append(kept, cache, step.batch.write_index)
        mixed = x.new_empty(len(x), spec.heads, spec.value_dim)
        for row in plan.prompts:
            whole = torch.cat((plain[row.tokens], turned[row.tokens]), -1)
            self._prompt(whole, plan.vectors(row, cache).to(x.dtype), row, step.lora, mixed[row.tokens])
        if plan.runs:
            absorbed = x.new_empty(len(x), spec.heads, spec.latent + spec.rope_dim)
            self._absorb(plain, plan, step.lora, absorbed[..., : spec.latent])
            absorbed[..., spec.latent :] = turned
            found = self._attention(absorbed, cache, plan, self.scale)
            self._values(found, plan, step.lora, mixed)
        return step.linear(self.o, self.layer, "o", mixed.flatten(1))

    def _prompt(
        self, q: Tensor, vectors: Tensor, row: LatentRow, lora: LoraContext | None, out: Tensor
    ) -> None:
        """Attention of a row's queries [m, heads, plain_dim + rope_dim] over the keys and values that follow
        from its latent vectors [length, latent + rope_dim], some heads at a time. Fills out [m, heads,
        value_dim]."""
        spec, weight = self.spec, torch.cat(self._parts, 1)
        latent, key = torch.split(vectors, [spec.latent, spec.rope_dim], -1)
        factors = [] if lora is None else list(lora.factors(self.layer, "kv_b"))
        own = [(a, b) for tokens, a, b in factors if tokens.start <= row.tokens.start < tokens.stop]
        shrunk = [latent.float() @ a.float().T for a, _ in own]
        at_once = max(1, MOST_NUMBERS // (row.length * weight.shape[1]))
        for first in range(0, spec.heads, at_once):
            heads = slice(first, min(first + at_once, spec.heads))
            whole = F.linear(latent, weight[heads].flatten(0, 1))
            for (_, b), inner in zip(own, shrunk, strict=True):
                of_heads = b.view(len(b), spec.heads, -1)[:, heads].flatten(1)
                whole = (whole.float() + inner @ of_heads.float()).to(whole.dtype)
            k, v = torch.split(
                whole.view(len(vectors), -1, weight.shape[1]), [spec.plain_dim, spec.value_dim], -1
            )
            k = torch.cat((k, key.unsqueeze(1).expand(-1, k.shape[1], -1)), -1)
            out[:, heads] = prompt_attention(q[:, heads], k, v, self.scale)

    @property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """K [heads, plain_dim, latent] and V [heads, value_dim, latent]."""
        spec = self.spec
        whole = self.kv_b.plain().view(spec.heads, -1, spec.latent)
        keys, values = torch.split(whole, [spec.plain_dim, spec.value_dim], 1)
        return keys, values

    def _absorb(self, q: Tensor, plan: LatentPlan, lora: LoraContext | None, y: Tensor) -> None:
        """K_h^T q_h of absorbed tokens, each with its adapter: q [T, heads, plain_dim], y [T, heads,
        latent]."""
        keys, _ = self._parts
        scaled = q if lora is None else self._scaled(q, lora)
        for run in plan.runs:
            y[run] = torch.matmul(scaled[run].transpose(0, 1), keys).transpose(0, 1)
        if lora is None:
            return
        for tokens, a, b in lora.factors(self.layer, "kv_b"):
            b = b.view(len(b), self.heads, -1)[..., : self.spec.plain_dim].float()
            for own in plan.overlaps(tokens):
                shrunk = torch.einsum("thd,rhd->thr", q[own].float(), b)
                y[own] = (y[own].float() + shrunk @ a.float()).to(y.dtype)

    def _values(self, mixed: Tensor, plan: LatentPlan, lora: LoraContext | None, y: Tensor) -> None:
        """V_h c_h of absorbed tokens, each with its adapter: mixed [T, heads, latent], y [T, heads,
        value_dim]."""
        _, values = self._parts
        for run in plan.runs:
            y[run] = torch.matmul(mixed[run].transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
        if lora is None:
            return
        skipped = self.spec.plain_dim
        if lora.rescales:
            whole = y.new_zeros(len(y), self.heads, skipped + self.spec.value_dim)
            whole[..., skipped:] = y
            lora.rescale(self.layer, "kv_b", (whole.view(len(y), -1),))
            y.copy_(whole[..., skipped:])
        for tokens, a, b in lora.factors(self.layer, "kv_b"):
            b = b.view(len(b), self.heads, -1)[..., skipped:].float()
            for own in plan.overlaps(tokens):
                shrunk = mixed[own].float() @ a.float().T
                y[own] = (y[own].float() + torch.einsum("thr,rhd->thd", shrunk, b)).to(y.dtype)

    def _scaled(self, q: Tensor, lora: LoraContext) -> Tensor:
        """q times the gains of the adapters' keys. A shift of all keys of a head changes no weight, because
        it changes all of a query's scores alike."""
        if not lora.rescales:
            return q
        widened = q.new_zeros(2, len(q), self.heads, self.spec.plain_dim + self.spec.value_dim)
        widened[0, ..., : self.spec.plain_dim] = q
        for part in widened:
            lora.rescale(self.layer, "kv_b", (part.view(len(q), -1),))
        return (widened[0] - widened[1])[..., : self.spec.plain_dim]

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for linear in (*self.linears(), self.kv_b):
            yield from linear.tensors()
        if self.q_norm is not None:
            yield from self.q_norm.tensors(f"{self.prefix}.q_a_layernorm")
        yield from self.kv_norm.tensors(f"{self.prefix}.kv_a_layernorm")

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield self.kv_norm
        if self.q_norm is not None:
            yield self.q_norm

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.first
        if self.q_b is not None:
            yield self.q_b
        yield self.kv_a
        yield self.o

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield (self._key,), self.first
        if self.q_b is not None:
            yield ("q_b",), self.q_b
        yield ("kv_a",), self.kv_a
        yield ("kv_b",), self.kv_b
        yield ("o",), self.o
