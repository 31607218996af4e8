"""What a model's replicas and ranks would do on given devices, by arithmetic. docs/operate/planning.md
explains each formula.

A step takes the time to read the weights once, for each token the time to compute and exchange it, and for
each position that a token attends to the time to read its keys and values. These are the `Costs` of the
simulator, which therefore plays the same machine with queues and chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, prod

import torch

from personae.actors.deployment.devices import Device
from personae.actors.simulation.trouble import Costs
from personae.engine.checkpoints.base import EMBEDDING
from personae.engine.config import ModelConfig
from personae.engine.kv import KVCache
from personae.engine.layers.block import NoBlockSpec
from personae.engine.layers.dense_and_experts import experts_of
from personae.engine.loader import Described
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.comm import Comm, Unconnected
from personae.engine.parallel.expert_placement import ExpertGroups
from personae.engine.scheduling.scheduler import MICRO_BATCH
from personae.errors import LoadError

BANDWIDTH_SHARE, FLOPS_SHARE = 0.7, 0.5  # of the makers' figures that kernels reach
MEMORY_SHARE = 0.9  # of a device's memory; the rest is for a step and for libraries
MOST_ROWS = 256  # sequences of a step
PAGE = 256  # tokens, over which states are spread
ROUNDS = 20  # the more sequences a step has, the more experts it reads, and the longer it takes


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests per second, with prompts of `prompt` tokens and answers of `answer` tokens on average.
    The longest sequence has `context` tokens."""

    rate: float
    prompt: int
    answer: int
    context: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`replicas` engines. In each, `tensor` ranks share the layers of each of `stages` stages. Or `attention`
    ranks of each stage have all of its attention, for other sequences each, and share MLPs and experts (DP
    attention)."""

    tensor: int
    stages: int
    replicas: int
    attention: int = 1

    @property
    def ranks(self) -> int:
        """The devices of a replica."""
        return self.tensor * self.stages * self.attention

    @property
    def runs(self) -> bool:
        """Whether Personae runs it so far."""
        return self.attention == 1 or self.stages == 1


@dataclass(frozen=True, slots=True)
class Expected:
    """What a replica does: the sequences that are answered at a time on average, the seconds to the first
    token and from one token to the next, and the most requests per second that it can answer. The seconds are
    infinite if there are more requests than that."""

    rows: float
    first: float
    gap: float
    most: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a layout would do. weight_bytes, kv_tokens: of the device with the most weights, and of a replica.
    costs: of a replica. rows, first, gap: see `Expected`. most: the requests per second that all replicas can
    answer. problem: why it cannot serve the model at all."""

    layout: Layout
    weight_bytes: int
    kv_tokens: int = 0
    costs: Costs | None = None
    rows: float = 0.0
    first: float = inf
    gap: float = inf
    most: float = 0.0
    problem: str | None = None

    def seconds(self, load: Load) -> float:
        """The seconds of an average answer."""
        return self.first + self.gap * (load.answer - 1)


def estimates(described: Described, device: Device, count: int, load: Load) -> list[Estimate]:
    """All layouts that divide `count` devices equally, the best first: with the shortest answers at this
    load, then with the most requests per second. Raises LoadError for a load that the model cannot have."""
    longest = described.config.max_position
    if load.context > longest:
        raise LoadError(f"--context {load.context} is more than the model's own {longest} tokens.")
    if load.prompt + load.answer > load.context:
        raise LoadError(
            f"--prompt {load.prompt} and --answer {load.answer} are more than "
            f"--context {load.context} together."
        )
    found = [_estimate(described, device, layout, load) for layout in _layouts(described, count)]
    return sorted(found, key=lambda each: (each.problem is not None, each.seconds(load), -each.most))


def _layouts(described: Described, count: int) -> Iterator[Layout]:
    for size in _divisors(count):
        for stages in _divisors(count // size):
            replicas = count // size // stages
            layouts = [Layout(size, stages, replicas)]
            if size > 1 and any(experts_of(layer) is not None for layer in described.config.layer_specs):
                layouts.append(Layout(1, stages, replicas, attention=size))
            yield from (layout for layout in layouts if _divides(described.config, layout))


def _divides(config: ModelConfig, layout: Layout) -> bool:
    """Whether the model can be divided so."""
    comm = _comm(layout)
    try:
        divided = config.of_rank(0, comm.size, comm.expert_groups, attention_ranks=comm.attention_ranks)
        divided.of_stage(0, comm.stages)
    except LoadError:
        return False
    return True


def _comm(layout: Layout) -> Comm:
    """The first rank of a replica."""
    size, groups = layout.tensor * layout.attention, ExpertGroups(layout.attention)
    attention = size if layout.attention > 1 else 0
    return Unconnected(0, size, 0, layout.stages, groups, attention_ranks=attention)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _estimate(described: Described, device: Device, layout: Layout, load: Load) -> Estimate:
    stages = [_StageBytes.of(decoder, layout.attention) for _, decoder in described.decoders(_comm(layout))]
    found = Estimate(layout, max(stage.weights for stage in stages))
    rooms = [device.memory * MEMORY_SHARE - stage.weights for stage in stages]
    if min(rooms) <= 0:
        return replace(found, problem="the weights do not fit")
    tokens = int(
        min((room / stage.kv for room, stage in zip(rooms, stages, strict=True) if stage.kv), default=inf)
    )
    found = replace(found, kv_tokens=tokens * layout.attention)
    if tokens < load.context:
        return replace(found, problem=f"the KV cache has room for {tokens} tokens")
    own = replace(load, rate=load.rate / layout.replicas)
    active = _active_parameters(described) / (layout.tensor * layout.attention)
    most_rows = min(MOST_ROWS, found.kv_tokens / (load.prompt + load.answer))
    full = _costs(described, device, layout, stages, active, most_rows / layout.stages)
    most, costs, rows = expected(full, own, most_rows, layout.stages).most, full, 0.0
    for _ in range(ROUNDS if own.rate < most else 0):
        costs = _costs(described, device, layout, stages, active, 1 + rows / layout.stages)
        rows = min(expected(costs, own, most_rows, layout.stages).rows, most_rows)
    one = expected(costs, own, most_rows, layout.stages)
    return replace(
        found, costs=costs, rows=one.rows, first=one.first, gap=one.gap, most=most * layout.replicas
    )


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """What one rank of a stage has. In bytes: `weights` in all, `shared` of them that each step reads, and
    `experts` of them; `kv` of a token. `chosen`: the share of experts that a token uses. `sent`: how often
    its hidden states go to a rank that shares an MLP, and back."""

    weights: int
    shared: int
    experts: int
    chosen: float
    kv: float
    sent: float

    @classmethod
    def of(cls, decoder: Decoder, attention: int) -> "_StageBytes":
        experts = sum(tensor.nbytes for name, tensor in decoder.tensors() if ".experts." in name)
        looked_up = 0 if decoder.config.tie else decoder.embedding.nbytes
        shared = sum(not isinstance(layer.mlp, NoBlockSpec) for layer in decoder.config.layer_specs)
        return cls(
            decoder.nbytes,
            decoder.nbytes - experts - looked_up,
            experts,
            _share_chosen(decoder.config),
            KVCache.bytes_per_page(decoder.config.kv_specs, PAGE, decoder.dtype) / PAGE,
            2 * shared * attention if attention > 1 else 0,
        )


def _share_chosen(config: ModelConfig) -> float:
    """The share of the experts that a token uses; 0 if there are none."""
    specs = [moe for layer in config.layer_specs if (moe := experts_of(layer)) is not None]
    return sum(spec.routing.top_k / spec.experts for spec in specs) / max(len(specs), 1)


def _active_parameters(described: Described) -> float:
    """The parameters that a token is multiplied with."""
    config, total = described.config, 0.0
    share = _share_chosen(config) or 1.0
    for name, tensor in described.stored.items():
        if name != EMBEDDING or config.tie:
            total += prod(tensor.shape) * (share if ".experts." in name else 1.0)
    return total


def _costs(
    described: Described,
    device: Device,
    layout: Layout,
    stages: list[_StageBytes],
    active: float,
    rows: float,
) -> Costs:
    """The seconds of a step and of its parts on one replica, with about so many rows in a step. `active`: the
    parameters of a rank that a token is multiplied with."""
    bandwidth, flops = device.bandwidth * BANDWIDTH_SHARE, device.flops * FLOPS_SHARE
    read = sum(stage.shared + stage.experts * (1 - (1 - stage.chosen) ** rows) for stage in stages)
    hidden = described.config.hidden_size * torch.finfo(described.numerics.dtype).bits // 8
    sums = 2 * described.config.layers + 1 if layout.tensor > 1 else 0
    passed = layout.stages if layout.stages > 1 else 0
    # In a ring each device sends and receives the sum's parts twice, but for its own.
    volume = hidden * (2 * sums * (layout.tensor - 1) / layout.tensor + passed / layout.attention)
    # Each of them sends and receives what is of its own sequences.
    among = layout.attention
    volume += hidden * sum(stage.sent for stage in stages) * (among - 1) / among**2
    exchanges = sums + passed + (2 * described.config.layers if among > 1 else 0)
    return Costs(
        step=read / bandwidth + layout.stages * device.launch + exchanges * device.latency,
        token=2 * active / flops + volume / device.link,
        row=0.0,
        adapter=0.0,
        context=sum(stage.kv for stage in stages) / bandwidth / among,
        host=0.0,
        runs_ahead=device.gpu,
        rests=False,
    )


def _row_seconds(costs: Costs, load: Load) -> float:
    """What a sequence that is being answered adds to a step."""
    return costs.token + costs.context * (load.prompt + load.answer / 2)


def expected(costs: Costs, load: Load, rows: float, stages: int = 1) -> Expected:
    """What one replica does with a load. `rows`: the most sequences that it answers at a time. `stages`
    compute as many steps at the same time, with equal parts of the sequences if these are many."""
    divided = _expected(costs, load, rows, stages, stages)
    if stages == 1 or divided.rows > MICRO_BATCH:
        return divided
    return replace(_expected(costs, load, rows, stages, 1), most=divided.most)


def _expected(costs: Costs, load: Load, rows: float, stages: int, parts: int) -> Expected:
    """`parts`: of the sequences, in as many steps."""
    each, prompt = _row_seconds(costs, load), load.prompt * costs.token
    most = rows / (load.answer * (costs.step + rows / parts * each) + rows * prompt / stages)
    busy = load.rate * prompt / stages  # the share of the time that prompts take
    left = 1 - busy - load.rate * load.answer * each / parts
    if load.rate >= most or left <= 0:
        return Expected(rows, inf, inf, most)
    mean = load.rate * load.answer * (costs.step + each) / left  # Little's law; a request sees so many others
    step = costs.step + (1 + mean / parts) * each
    gap = step / (1 - busy)  # steps also have the tokens of prompts
    # half of a stage's step, and the one behind it, which a GPU has launched or another stage computes
    waiting = min(mean / parts, 1) * gap / stages * (1.5 if costs.runs_ahead or stages > 1 else 0.5)
    queue = busy / (2 * (1 - busy)) * prompt / stages  # for other prompts (M/D/1)
    return Expected(mean, waiting + queue + step + prompt, gap, most)
