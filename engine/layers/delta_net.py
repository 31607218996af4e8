"""Gated delta nets: a state of each value head, which each token decays, corrects and reads.

Source: https://arxiv.org/abs/2412.06464. The cache keeps states, and what each token's update reads; see
`kernels/states.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.engine.layers.block import BlockContext, KVSpec, UndividedBlock, UndividedSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import Norm, RMSNorm
from personae.engine.layers.step import ForwardContext
from personae.kernels.decoder import Weight
from personae.kernels.operators import append_latent, gated_delta
from personae.lora.sites import LoraSite

PLAIN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(UndividedSpec):
    """`heads` value heads of `value_dim` numbers share `key_heads` queries and keys of `key_dim`. `length`:
    of the convolution. `interleaved`: one module has q, k, v and the gate z of each key head, another b and a
    of each key head; else they are four modules. `eps`: of the norm of results."""

    kind = "gated delta nets"

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    length: int
    interleaved: bool
    eps: float

    @property
    def inner(self) -> int:
        """The width of v, of the gate and of the results."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """The width of q, k and v together, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def kv(self) -> KVSpec:
        """See BlockSpec."""
        return KVSpec(
            1, self.mixed + 2 * self.heads, latent=0, state=(self.heads, self.key_dim, self.value_dim)
        )

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    @property
    def modules(self) -> dict[str, int]:
        """The modules that read x, and their outputs."""
        if self.interleaved:
            return dict(zip(INTERLEAVED, (self.mixed + self.inner, 2 * self.heads), strict=True))
        return dict(zip(PLAIN, (self.mixed, self.inner, self.heads, self.heads), strict=True))

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        found = {name: (hidden_size, outputs) for name, outputs in self.modules.items()}
        found["out_proj"] = self.inner, hidden_size
        return {
            f"linear_{name}": LoraSite(f"linear_attn.{name}", f"linear_{name}", *sizes)
            for name, sizes in found.items()
        }

    def build(self, context: BlockContext) -> "DeltaNet":
        """See BlockSpec."""
        return DeltaNet(self, context)


class DeltaNet(UndividedBlock):
    """y = W_out (norm(o) * silu(z)), o = gated delta rule over convolved q, k, v with gates b and a. All are
    linear in x."""

    heads, capturable = 0, False  # the host makes the plan of a step from its lengths

    def __init__(self, spec: DeltaNetSpec, context: BlockContext) -> None:
        self.spec, self.kv, self.layer = spec, spec.kv, context.layer
        self.prefix, hidden, device = f"{context.prefix}.linear_attn", context.hidden_size, context.device
        self.firsts = {
            name: context.linear((f"{self.prefix}.{name}",), hidden, (outputs,), bias=False)
            for name, outputs in spec.modules.items()
        }
        self.last = context.linear((f"{self.prefix}.out_proj",), spec.inner, (hidden,), bias=False)
        self.weight = torch.empty(spec.mixed, spec.length, dtype=torch.float32, device=device)
        self.decay, self.dt_bias = torch.empty(2, spec.heads, dtype=torch.float32, device=device)
        self.norm = RMSNorm(spec.value_dim, spec.eps, dtype=torch.float32, device=device)
        self._append = append_latent.on(device, context.dtype)
        self._delta = gated_delta.on(device, context.dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        spec, cache, plan = self.spec, step.caches[self.layer][0], step.state_plan
        assert plan is not None
        mixed, gate, rates = self._read(
            [step.linear(linear, self.layer, f"linear_{name}", x) for name, linear in self.firsts.items()]
        )
        kept = torch.cat((mixed, rates), -1)
        found = self._delta(
            kept,
            cache,
            step.states[self.layer],
            plan,
            self.weight,
            self.decay,
            self.dt_bias,
            spec.key_heads,
        )
        self._append(kept[plan.newest].unsqueeze(1), cache, plan.places)
        gated = self.norm(found) * F.silu(gate.float().view_as(found))
        return step.linear(self.last, self.layer, "linear_out_proj", gated.flatten(1).to(x.dtype))

    def _read(self, parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v together; the gate z; b and a together. All are [T, width]."""
        spec = self.spec
        if not spec.interleaved:
            mixed, gate, b, a = parts
            return mixed, gate, torch.cat((b, a), -1)
        share = spec.heads // spec.key_heads
        wide, rates = (part.view(len(part), spec.key_heads, -1) for part in parts)
        sizes = [spec.key_dim, spec.key_dim, share * spec.value_dim, share * spec.value_dim]
        q, k, v, gate = (part.flatten(1) for part in torch.split(wide, sizes, -1))
        b, a = (part.flatten(1) for part in rates.chunk(2, -1))
        return torch.cat((q, k, v), -1), gate, torch.cat((b, a), -1)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for linear in self.linears():
            yield from linear.tensors()
        yield f"{self.prefix}.conv1d.weight", self.weight.unsqueeze(1)
        yield f"{self.prefix}.A_log", self.decay
        yield f"{self.prefix}.dt_bias", self.dt_bias
        yield from self.norm.tensors(f"{self.prefix}.norm")

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield self.norm

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield from self.firsts.values()
        yield self.last

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        for name, linear in self.firsts.items():
            yield (f"linear_{name}",), linear
        yield ("linear_out_proj",), self.last
