"""What a simulated run follows from, and what came of it."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from personae.actors.simulation.faults import KINDS
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.engine.sequence import LatencyTargets

PlacementName = Literal["random", "least-loaded", "prefix", "d2lpm", "estimated"]
PLACEMENT_NAMES: tuple[PlacementName, ...] = get_args(PlacementName)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run follows from.

    `pages` of `page_size` tokens, `slots` sequences and `batch` tokens in a step, `places` for adapters on
    the device; the memory of `lendable` of the pages may be lent to more of them. `faults_every` virtual
    seconds (None: never) one of `kinds` strikes. After every `lull` requests the next ones wait until all
    before have ended, and nothing may be left in the house. The books are checked `every` so many steps. At
    most `max_live` sequences are in the house. There are `replicas` engines, each of this size; `placement`
    names the policy that chooses among them. They are of `classes` numerics classes in turn.
    With `kv_events` they tell what enters and leaves their prefix caches. With `calm_lulls` no fault strikes
    once all requests have ended: of many engines one would always be down. By `goal` sequences without
    targets of their own are judged.
    """

    seed: int
    workload: SimulatedWorkload = field(default_factory=SimulatedWorkload)
    costs: Costs = field(default_factory=Costs)
    faults_every: float | None = None
    kinds: tuple[str, ...] = KINDS
    pages: int = 256
    page_size: int = 8
    slots: int = 32
    batch: int = 256
    places: int = 8
    lendable: int = 0
    window: int = 16
    max_live: int = 512
    max_restarts: int = 1_000_000
    lull: int = 500
    every: int = 64
    longest_wait: float = 120.0
    replicas: int = 1
    placement: PlacementName = "estimated"
    classes: int = 1
    kv_events: bool = False
    calm_lulls: bool = False
    goal: LatencyTargets | None = None


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What came of it. Times are virtual seconds; `waits` are from arrival to first token, `paces` seconds a
    token after that, of each answer that ended by itself. `queries` prompt tokens were looked up in the
    prefix caches, of which `hits` were there; `loads` adapters were brought to a device, `moved` streams to
    another replica, `changed` of them to another numerics class, of which clients were `told`.
    `targeted` sequences with latency targets ended, `good` ones met them."""

    scenario: Scenario
    seconds: float
    requests: int
    tokens: int
    engine_steps: int
    loop_steps: int
    restarts: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    lulls: int
    busy: float
    waits: list[float]
    paces: list[float]
    trace: int
    queries: int = 0
    hits: int = 0
    loads: int = 0
    moved: int = 0
    changed: int = 0
    told: int = 0
    targeted: int = 0
    good: int = 0
