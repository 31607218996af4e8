"""Mixture of experts: a router chooses a few MLPs for each token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import MLP, Activation, MlpSpec, gate_of
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import Backend, LinearMethod, Product
from personae.engine.quantization.unquantized import BatchInvariant, Unquantized
from personae.kernels import reference
from personae.kernels.decoder import PackedLinear, Weight
from personae.kernels.moe import Routing, combine, expert_linear, grouped_linear, route, route_scored
from personae.lora.shards import INPUTS, OUTPUTS, Shard
from personae.lora.sites import LoraSite


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """How a checkpoint has all experts as one tensor: `gate_up` [experts, 2 * size, hidden] with the rows of
    gate first, and `down` [experts, hidden, size], by their names in the block. `suffix`: of a weight's name.
    `transposed`: inputs come before outputs. `alternate`: so do the rows of gate and up, as in gpt-oss."""

    gate_up: str
    down: str
    suffix: str = ".weight"
    transposed: bool = False
    alternate: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Some of `experts` MLPs, each with inner vectors of `size`, chosen for each token as `routing` says.

    `path`, `names`: the block's name in a layer, and the names of an expert's gate, up and down. `router`:
    the router's name in the block. `weighs_input`: an expert's weight multiplies its input, not its result.
    `router_inputs`: the width of what the router reads, None for that of the experts' input.
    `router_scale`: the router reads norm(x) / sqrt(hidden) times these numbers, without other weights of the
    norm. `expert_scale`: what multiplies each expert's weight.
    `gated`: experts are MLPs with a gate. `correction`: the name of the bias of its choice, None for none,
    and `correction_shape` its shape in the checkpoint. `bias`: the experts and the router have biases.
    `shared`: an MLP that every token uses too, and `shared_gate` the name in the block of what weighs it, by
    a sigmoid. `fused`: how a checkpoint may have all experts as one tensor. `module`, `router_module`: PEFT's
    names for the block and its router, None for those of the checkpoint. `expert_groups`: how many groups of
    the ranks that share it have different experts. `first`: of a rank's, where its inner vectors begin in
    those of the whole, and `own` its experts.
    """

    experts: int
    size: int
    routing: Routing
    activation: Activation = "silu"
    path: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    router: str = "gate"
    router_inputs: int | None = None
    weighs_input: bool = False
    router_scale: str | None = None
    expert_scale: str | None = None
    correction: str | None = None
    correction_shape: tuple[int, ...] = (-1,)
    bias: bool = False
    shared: MlpSpec | None = None
    shared_gate: str | None = None
    fused: "FusedExperts | None" = None
    module: str | None = None
    router_module: str | None = None
    expert_groups: int = 1
    first: int | None = None
    own: range | None = None

    @property
    def held(self) -> range:
        """The experts whose weights it has."""
        return range(self.experts) if self.own is None else self.own

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return True

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec: the router, the experts and the shared MLP."""
        path, (gate, up, down) = self.module or self.path, self.names
        path = f"{path}." if path else ""
        shared = {} if self.shared is None else self.shared.lora_sites(hidden_size)

        def site(name: str, group: str, inputs: int, outputs: int) -> LoraSite:
            return LoraSite(
                f"{path}experts.*.{name}",
                group,
                inputs,
                outputs,
                len(self.held),
                self.fused is not None and self.fused.alternate,
                self.fused is not None and self.fused.transposed and not self.fused.alternate,
            )

        return {
            "router": LoraSite(
                f"{path}{self.router_module or self.router}",
                "router",
                self.router_inputs or hidden_size,
                self.experts,
            ),
            **({"expert_gate": site(gate, "expert_gate_up", hidden_size, self.size)} if self.gated else {}),
            "expert_up": site(up, "expert_gate_up", hidden_size, self.size),
            "expert_down": site(down, "expert_down", self.size, hidden_size),
            **shared,
        }

    def within(self, prefix: str) -> str:
        """The block's name behind a layer's, or that of the layer if `path` is empty."""
        return f"{prefix}.{self.path}" if self.path else prefix

    @property
    def inner(self) -> tuple[str, ...]:
        """The short names of the LoRA sites that read an expert's input."""
        return ("expert_gate", "expert_up") if self.gated else ("expert_up",)

    def of_rank(self, rank: int, size: int) -> "MoeSpec":
        """See BlockSpec: of its group's experts, a part of the inner vectors of each. The router is whole."""
        sharing = size // self.expert_groups  # the ranks of a group
        if self.size % sharing:
            raise ValueError(f"experts with inner vectors of {self.size}")
        group, part = divmod(rank, sharing)
        inner, count = self.size // sharing, self.experts // self.expert_groups
        return replace(
            self,
            size=inner,
            first=part * inner,
            own=None if self.expert_groups == 1 else range(group * count, (group + 1) * count),
            shared=None if self.shared is None else self.shared.of_rank(rank, size),
        )

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        if self.first is None:
            return {}
        inner = ((self.first, self.first + self.size),)
        wide = Shard(OUTPUTS, inner, self.own)
        shared = {} if self.shared is None else self.shared.shards()
        return {
            **dict.fromkeys(self.inner, wide),
            "expert_down": Shard(INPUTS, inner, self.own),
            **shared,
        }

    def build(self, context: BlockContext) -> "MoE":
        """See BlockSpec."""
        return MoE(self, context)


class ExpertLinear(Linear):
    """One linear module per expert, all of one shape. The weights are one tensor, [experts * outputs,
    inputs], until a backend packs each of them."""

    def __init__(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        experts: int,
        *,
        bias: bool = False,
        method: type[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
        shards: Sequence[Shard] = (),
    ) -> None:
        super().__init__(
            names,
            inputs,
            outputs * experts,
            bias=bias,
            method=method,
            dtype=dtype,
            device=device,
            shards=shards,
        )
        self._width = sum(outputs)
        self._experts: list[Product] = []
        self._packed: list[PackedLinear] = []  # the experts, if a backend has packed all of them
        self._batched: Tensor | None = None  # the weights [experts, outputs, inputs], if not packed
        self._all, self._linear = grouped_linear(device, dtype), expert_linear.on(device, dtype)

    @property
    def capturable(self) -> bool:
        """See Block. Valid after `pack`."""
        return self._batched is not None and self._linear is not reference.expert_linear

    def pack(self) -> None:
        """See Linear."""
        parts = self.method.parts(self._width)
        self._experts = [part.finish(None) for part in parts]
        packed = [expert.packed for expert in self._experts if isinstance(expert, Backend)]
        if self._all is not None and len(packed) == len(parts):
            self._packed = packed
        if isinstance(self.method, Unquantized) and self._experts == parts:
            self._batched = self.method.weight.view(len(parts), self._width, -1)
        if any(product is not part for product, part in zip(self._experts, parts, strict=True)):
            del self.method

    def plain(self) -> Tensor:
        """See Linear."""
        return torch.cat([expert.plain() for expert in self._experts])

    def grouped(self, x: Tensor, starts: Tensor, experts: Tensor) -> Tensor:
        """Rows starts[e] to starts[e + 1] - 1 of x: [N, inputs] through expert e -> [N, outputs].

        starts: [experts + 1] int32, experts: [N] int64, both on x's device.
        """
        y = self._products(x, starts)
        return y if self.bias is None else y.add_(self.bias.view(-1, self._width)[experts])

    def _products(self, x: Tensor, starts: Tensor) -> Tensor:
        if self._batched is not None:
            return self._linear(x, self._batched, starts)
        ends = starts.tolist()
        if self._packed and self._all is not None:
            return self._all(x, self._packed, [stop - start for start, stop in pairwise(ends)])
        y = torch.empty(x.shape[0], self._width, dtype=x.dtype, device=x.device)
        for expert, (start, stop) in zip(self._experts, pairwise(ends), strict=True):
            if start < stop:
                y[start:stop] = expert.apply(x[start:stop], None)
        return y


class MoE:
    """y = sum over a token's experts e of w_e down_e(act(gate_e x) * up_e x).

    The w come from router x as the spec's `routing` says. They and the sum are computed in float32. Rows are
    grouped by expert, so that each expert is read once. The shared MLP, if there is one, is added.
    """

    kv, heads = None, 0

    def __init__(self, spec: MoeSpec, context: BlockContext) -> None:
        hidden, prefix = context.hidden_size, spec.within(context.prefix)
        dtype, device = context.dtype, context.device
        self.spec, self.layer, self._prefix = spec, context.layer, prefix
        gate, up, down = (
            [f"{prefix}.experts.{expert}.{name}" for expert in spec.held] for name in spec.names
        )
        self.router = Linear(
            (f"{prefix}.{spec.router}",),
            spec.router_inputs or hidden,
            (spec.experts,),
            bias=spec.bias,
            method=BatchInvariant,
            dtype=dtype,
            device=device,
        )
        pairs = tuple(up)
        if spec.gated:
            pairs = tuple(name for pair in zip(gate, up, strict=True) for name in pair)
        of, count = spec.shards(), len(spec.held)
        self._comm = context.comm
        self.gate_up = ExpertLinear(
            pairs,
            hidden,
            (spec.size,) * len(spec.inner),
            count,
            bias=spec.bias,
            method=context.scheme(pairs),
            dtype=dtype,
            device=device,
            shards=[of[name] for name in spec.inner] * count if of else (),
        )
        self.down = ExpertLinear(
            tuple(down),
            spec.size,
            (hidden,),
            count,
            bias=spec.bias and not spec.first,
            method=context.scheme(down),
            dtype=dtype,
            device=device,
            shards=[of["expert_down"]] * count if of else (),
        )
        self._numbers = torch.arange(spec.experts + 1, device=device)
        self._gate = gate_of(spec.activation, gated=spec.gated, device=device, dtype=dtype)
        self.correction = (
            torch.empty(spec.experts, dtype=torch.float32, device=device) if spec.correction else None
        )
        self.shared = None if spec.shared is None else MLP(spec.shared, context)
        self.shared_gate = (
            Linear(
                (f"{prefix}.{spec.shared_gate}",),
                hidden,
                (1,),
                bias=False,
                method=BatchInvariant,
                dtype=dtype,
                device=device,
            )
            if spec.shared_gate
            else None
        )
        self._router_norm: Norm | None = None
        if spec.router_scale is not None:  # its weights are the numbers
            self._router_norm = context.norm(hidden)
        self._root = hidden**-0.5
        self._expert_scale = (
            torch.empty(spec.experts, dtype=torch.float32, device=device) if spec.expert_scale else None
        )
        self._simple = spec.correction is None and spec.routing == Routing(
            spec.routing.top_k, spec.routing.renormalize
        )
        self._route, self._route_scored = route.on(device, dtype), route_scored.on(device, dtype)
        self._combine = combine.on(device, dtype)

    def __call__(self, x: Tensor, step: ForwardContext, routed_by: Tensor | None = None) -> Tensor:
        """See Block. `routed_by`: what the router reads, None for x."""
        read = x if routed_by is None else routed_by
        if self._router_norm is not None:
            read = self._router_norm(read) * self._root
        routing, logits = self.spec.routing, step.linear(self.router, self.layer, "router", read)
        if self._simple:
            weights, chosen = self._route(logits, routing.top_k, routing.renormalize)
        else:
            weights, chosen = self._route_scored(logits, self.correction, routing)
        if self._expert_scale is not None:
            weights = weights * self._expert_scale[chosen]
        experts, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(experts, self._numbers, out_int32=True)
        if self.spec.own is None:
            y = self._products(x, order, experts, starts, step, weights)
        else:
            y = self._own_products(x, order, experts, starts, step, weights)
        if self.spec.weighs_input:
            weights = torch.ones_like(weights)
        y = self._combine(y, weights, order)
        if self.shared is not None:
            common = self.shared.partial(x, step)
            y = y + (common if self.shared_gate is None else self.shared_gate(x).sigmoid() * common)
        return self._comm.all_reduce(y)

    def _own_products(
        self,
        x: Tensor,
        order: Tensor,
        experts: Tensor,
        starts: Tensor,
        step: ForwardContext,
        weights: Tensor,
    ) -> Tensor:
        """As `_products`, but rows of experts that this rank does not have are zero."""
        own = self.spec.held
        first, stop = starts[own.start : own.stop + 1 : len(own)].tolist()
        y = x.new_zeros(len(order), x.shape[-1])
        if first < stop:
            rows, numbers = slice(first, stop), starts[own.start : own.stop + 1] - first
            y[rows] = self._products(x, order[rows], experts[rows] - own.start, numbers, step, weights)
        return y

    def _products(
        self,
        x: Tensor,
        order: Tensor,
        experts: Tensor,
        starts: Tensor,
        step: ForwardContext,
        weights: Tensor,
    ) -> Tensor:
        """x: [T, hidden] through experts -> [N, hidden].

        order: [N] int64, t * top_k + j of each row. experts: [N] int64, ascending, numbered from 0 as this
        rank has them. starts: as of `ExpertLinear.grouped`. weights: [T, top_k], of all experts.
        """
        tokens = order // self.spec.routing.top_k
        lora = None if step.lora is None else step.lora.routed(tokens, experts)

        def grouped(module: ExpertLinear, group: str, x: Tensor, sizes: list[int]) -> Tensor:
            if lora is None:
                return module.grouped(x, starts, experts)
            finish = lora(self.layer, group, x)
            y = module.grouped(x, starts, experts)
            finish(torch.split(y, sizes, dim=-1))
            return y

        size, hidden, rows = self.spec.size, x.shape[-1], x[tokens]
        if self.spec.weighs_input:
            rows *= weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        inner = self._gate(grouped(self.gate_up, "expert_gate_up", rows, [size] * len(self.spec.inner)))
        return grouped(self.down, "expert_down", inner, [hidden])

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.gate_up.capturable and self.down.capturable

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        for linear in self.linears():
            yield from linear.tensors()
        if self.correction is not None:
            name = f"{self._prefix}.{self.spec.correction}"
            yield name, self.correction.view(self.spec.correction_shape)
        if self._router_norm is not None:
            yield f"{self._prefix}.{self.spec.router_scale}", self._router_norm.weight
        if self._expert_scale is not None:
            yield f"{self._prefix}.{self.spec.expert_scale}", self._expert_scale

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        for linear in self.linears():
            yield from linear.shards()

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield from ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.router
        yield self.gate_up
        yield self.down
        if self.shared is not None:
            yield from self.shared.linears()
        if self.shared_gate is not None:
            yield self.shared_gate

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("router",), self.router
        if self.shared is not None:
            yield from self.shared.lora_linears()
