"""Mixture of experts: a router chooses a few MLPs for each token."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext
from personae.engine.layers.expert_slots import ExpertSlots, arriving
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import MLP, Activation, MlpSpec, gate_of
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.engine.parallel.comm import ONE_RANK, Collectives
from personae.engine.parallel.expert_placement import (
    NO_GROUPS,
    ExpertGroups,
    Placement,
    first_placement,
)
from personae.engine.quantization.base import Backend, LinearMethod, Product, StoredParts, load
from personae.engine.quantization.unquantized import BatchInvariant, Unquantized
from personae.kernels import reference
from personae.kernels.decoder import (
    ExpertsWeights,
    LinearWeights,
    MlpWeights,
    PackedLinear,
    Weight,
    grouped_linear,
)
from personae.kernels.moe import Routing
from personae.kernels.operators import combine, expert_linear, route, route_scored
from personae.kernels.quantized import QuantizedWeight
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


USUAL_NAMES = ("gate_proj", "up_proj", "down_proj")


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
    names for the block and its router, None for those of the checkpoint. `expert_groups`: how the ranks that
    share it divide its experts. `first`: of a rank's, where its inner vectors begin in those of the whole;
    `group`, its group, and `own`, the experts that it has first.
    """

    experts: int
    size: int
    routing: Routing
    activation: Activation = "silu"
    path: str = "mlp"
    names: tuple[str, str, str] = USUAL_NAMES
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
    expert_groups: ExpertGroups = NO_GROUPS
    first: int | None = None
    group: int = 0
    own: range | None = None

    @property
    def held(self) -> range:
        """The experts whose weights it has."""
        return range(self.experts) if self.own is None else self.own

    @property
    def spare(self) -> int | None:
        """How many slots for further experts a rank has; None if experts stay where they are."""
        return None if self.own is None else self.expert_groups.spare

    @property
    def adapted(self) -> range:
        """The experts whose adapters' pairs a rank has: all, if experts may come to it."""
        return self.held if self.spare is None else range(self.experts)

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
                len(self.adapted),
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
        groups = self.expert_groups.number
        sharing = size // groups  # the ranks of a group
        if self.size % sharing:
            raise ValueError(f"experts with inner vectors of {self.size}")
        group, part = divmod(rank, sharing)
        inner, count = self.size // sharing, self.experts // groups
        return replace(
            self,
            size=inner,
            first=part * inner,
            group=group,
            own=None if groups == 1 else range(group * count, (group + 1) * count),
            shared=None if self.shared is None else self.shared.of_rank(rank, size),
        )

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        if self.first is None:
            return {}
        inner = ((self.first, self.first + self.size),)
        experts = self.own if self.spare is None else None
        wide = Shard(OUTPUTS, inner, experts)
        shared = {} if self.shared is None else self.shared.shards()
        return {
            **dict.fromkeys(self.inner, wide),
            "expert_down": Shard(INPUTS, inner, experts),
            **shared,
        }

    def build(self, context: BlockContext) -> "MoE":
        """See BlockSpec."""
        return MoE(self, context)


class ReadExpert(NamedTuple):
    """One expert's weight as a module multiplies by it, and its bias."""

    product: Product
    bias: Tensor | None


class ExpertLinear(Linear):
    """One linear module per expert, all of one shape. The weights are one tensor, [experts * outputs,
    inputs], until a backend packs each of them. `spare`: slots behind them, for experts that may come."""

    def __init__(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        experts: int,
        *,
        spare: int = 0,
        bias: bool = False,
        method: type[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
        shards: Sequence[Shard] = (),
        comm: Collectives = ONE_RANK,
    ) -> None:
        super().__init__(
            names,
            inputs,
            outputs * (experts + spare),
            bias=bias,
            method=method,
            dtype=dtype,
            device=device,
            shards=shards,
            comm=comm,
        )
        self._width, self._inputs = sum(outputs), inputs
        self._format, self._dtype, self._device = method, dtype, device
        self._ranks = self.method.ranks
        self.spare_bytes = self.method.weight.nbytes * spare // (experts + spare)
        for part in self.method.parts(self._width)[experts:]:
            weight = part.weight
            for tensor in weight.tensors() if isinstance(weight, QuantizedWeight) else (weight,):
                tensor.zero_()
        if spare and self.bias is not None:
            self.bias.zero_()
        self._experts: list[Product] = []
        self._packed: list[PackedLinear] = []  # the experts, if a backend has packed all of them
        self._batched: Tensor | None = None  # the weights [experts, outputs, inputs], if not packed
        self._all, self._linear = grouped_linear(device, dtype), expert_linear.on(device, dtype)

    @property
    def capturable(self) -> bool:
        """See Block. Valid after `pack`."""
        return self._batched is not None and self._linear is not reference.expert_linear

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Linear. Spare slots have no names."""
        for name, weight in zip(self.names, self.method.params(self.outputs), strict=False):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(self.names, torch.split(self.bias, self.outputs), strict=False):
                yield f"{name}.bias", bias

    def reading(
        self, names: Sequence[str], stored: Mapping[str, StoredParts]
    ) -> Generator[None, None, ReadExpert]:
        """Read one expert's modules of these names, a tensor at a time."""
        method, device = self._format(self._width, self._inputs, self._dtype, self._device), self._device
        method.ranks = self._ranks
        bias = None if self.bias is None else torch.empty(self._width, dtype=self.bias.dtype, device=device)
        sizes, shards = self.outputs[: len(names)], self._shards[: len(names)]
        places: list[tuple[str, Weight, Shard]] = [
            (f"{name}.weight", weight, shard)
            for name, weight, shard in zip(names, method.params(sizes), shards, strict=True)
        ]
        for name, place, shard in places:
            load(name, place, stored[name], shard)
            yield
        if bias is not None:
            for name, place, shard in zip(names, torch.split(bias, sizes), shards, strict=True):
                load(f"{name}.bias", place, stored[f"{name}.bias"], shard if shard.dim == OUTPUTS else None)
        method.loaded()
        return ReadExpert(method.finish(None), bias)

    def put(self, slot: int, expert: ReadExpert) -> None:
        """From now on the slot has this expert."""
        if self._batched is not None:
            self._batched[slot].copy_(expert.product.plain())
        else:
            self._experts[slot] = expert.product
        if self._packed:
            assert isinstance(expert.product, Backend)
            self._packed[slot] = expert.product.packed
        if self.bias is not None and expert.bias is not None:
            self.bias.view(-1, self._width)[slot].copy_(expert.bias)

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
            self._free()

    def _free(self) -> None:
        """Frees the plain weights, which products of their own replace."""
        del self.method, self._product

    @property
    def experts(self) -> list[LinearWeights]:
        """Each expert's weight and bias. Only before packed forms replace them."""
        weights = list(self.method.weight.split(self._width))
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, self._width)
        return [LinearWeights(*each) for each in zip(weights, biases, strict=True)]

    def hand_over(self, packed: Iterator[PackedLinear]) -> None:
        """See Linear: as many as there are experts."""
        self._packed = list(islice(packed, len(self.experts)))
        self._experts = [Backend(one) for one in self._packed]
        self._free()

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

    `slots`: the experts that this rank's group has, None for all. `loads`: [experts] int64, how many rows
    each expert of the layer has had, None if experts stay where they are.
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
        of, count, spare = spec.shards(), len(spec.held), spec.spare or 0
        self._comm = context.comm
        self._names = spec.names if spec.gated else spec.names[1:]
        self.slots: ExpertSlots | None = None
        if spec.own is not None:
            placement = first_placement(spec.experts, spec.expert_groups)
            self.slots = ExpertSlots(spec.experts, spec.group, placement, device)
        self.loads = (
            None if spec.spare is None else torch.zeros(spec.experts, dtype=torch.int64, device=device)
        )
        self._read: dict[int, tuple[ReadExpert, ReadExpert]] = {}  # by slot, experts that will be placed
        self.gate_up = ExpertLinear(
            pairs,
            hidden,
            (spec.size,) * len(spec.inner),
            count,
            spare=spare,
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
            spare=spare,
            bias=spec.bias and not spec.first,
            method=context.scheme(down),
            dtype=dtype,
            device=device,
            shards=[of["expert_down"]] * count if of else (),
            comm=self._comm.group,
        )
        self._numbers = torch.arange(count + spare + 1).to(device)  # on "meta" arange imports sympy: 40 MiB
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
        if self.loads is not None:
            self.loads += chosen.flatten().bincount(minlength=self.spec.experts)
        places = chosen if self.slots is None else self.slots.of(chosen, step.positions)
        places, order = places.flatten().sort(stable=True)
        starts = torch.searchsorted(places, self._numbers, out_int32=True)
        own = len(places) if self.slots is None else int(starts[-1])
        experts = places if self.loads is None else chosen.flatten()[order]
        y = x[:0]
        if own:
            y = self._products(x, order[:own], places[:own], experts[:own], starts, step, weights)
        if own < len(order):  # the rows of other groups' experts are zero here
            y = torch.cat((y, x.new_zeros(len(order) - own, x.shape[-1])))
        if self.spec.weighs_input:
            weights = torch.ones_like(weights)
        y = self._combine(y, weights, order)
        if self.shared is not None:
            common = self.shared.partial(x, step)
            y = y + (common if self.shared_gate is None else self.shared_gate(x).sigmoid() * common)
        return self._comm.all_reduce(y)

    def _products(
        self,
        x: Tensor,
        order: Tensor,
        places: Tensor,
        experts: Tensor,
        starts: Tensor,
        step: ForwardContext,
        weights: Tensor,
    ) -> Tensor:
        """x: [T, hidden] through experts -> [N, hidden].

        order: [N] int64, t * top_k + j of each row. places: [N] int64, ascending, the experts' slots on this
        rank. experts: [N] int64, their numbers in adapters. starts: as of `ExpertLinear.grouped`. weights:
        [T, top_k], of all experts.
        """
        tokens = order // self.spec.routing.top_k
        lora = None if step.lora is None else step.lora.routed(tokens, experts)

        def grouped(module: ExpertLinear, group: str, x: Tensor, sizes: list[int]) -> Tensor:
            if lora is None:
                return module.grouped(x, starts, places)
            finish = lora(self.layer, group, x)
            y = module.grouped(x, starts, places)
            finish(torch.split(y, sizes, dim=-1))
            return y

        size, hidden, rows = self.spec.size, x.shape[-1], x[tokens]
        if self.spec.weighs_input:
            rows *= weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        inner = self._gate(grouped(self.gate_up, "expert_gate_up", rows, [size] * len(self.spec.inner)))
        return grouped(self.down, "expert_down", inner, [hidden])

    def reading(self, placement: Placement, stored: Mapping[str, StoredParts]) -> Iterator[None]:
        """Read the experts that come to this rank with the placement, a tensor at a time. They are used from
        `place` on."""
        assert self.slots is not None
        self._read = {}
        for slot, expert in arriving(self.slots.own, placement[self.spec.group]).items():
            *inner, down = (f"{self._prefix}.experts.{expert}.{name}" for name in self._names)
            first = yield from self.gate_up.reading(inner, stored)
            second = yield from self.down.reading([down], stored)
            self._read[slot] = first, second

    @property
    def spare_bytes(self) -> int:
        """The bytes of the slots for experts that may come."""
        return self.gate_up.spare_bytes + self.down.spare_bytes

    def place(self, placement: Placement) -> None:
        """From now on experts are where the placement says, which `reading` has had."""
        assert self.slots is not None
        for slot, (first, second) in self._read.items():
            self.gate_up.put(slot, first)
            self.down.put(slot, second)
        self._read = {}
        self.slots.place(placement)

    @property
    def capturable(self) -> bool:
        """See Block."""
        return self.gate_up.capturable and self.down.capturable

    @property
    def plain(self) -> bool:
        """Whether it has none of the rarer parts, so that a whole decoder in one call can have it."""
        spec = self.spec
        rare = spec.weighs_input or not spec.gated or spec.activation not in ("silu", "silu_clamped")
        scaled = (
            spec.router_inputs is not None or self._router_norm is not None or spec.expert_scale is not None
        )
        divided = self.slots is not None or self._comm.size > 1
        shared = spec.shared is None or (spec.shared.plain and spec.shared.activation == spec.activation)
        return not (rare or scaled or divided) and shared

    @property
    def weights(self) -> ExpertsWeights:
        """Its weights without those of the shared MLP, if it is plain."""
        pairs = zip(self.gate_up.experts, self.down.experts, strict=True)
        return ExpertsWeights(
            self.router.weights,
            tuple(MlpWeights(gate_up, down) for gate_up, down in pairs),
            self.spec.routing,
            self.correction,
            None if self.shared_gate is None else self.shared_gate.weights,
        )

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
