"""The input of a simulated run, and its result."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from personae.actors.options import PrefillReplicas
from personae.actors.simulation.faults import KINDS
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.engine.sequence import LatencyTargets

PlacementName = Literal["random", "least-loaded", "prefix", "d2lpm", "estimated"]
PLACEMENT_NAMES: tuple[PlacementName, ...] = get_args(PlacementName)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that determines a run.

    There are `pages` of `page_size` tokens. A step has up to `slots` sequences and `batch` tokens. The device
    has `places` for adapters, and may lend the memory of `lendable` pages to more of them. Every
    `faults_every` virtual seconds (None: never) one of `kinds` strikes. After every `lull` requests, new ones
    wait until all earlier ones have ended, and then nothing may be left of them. The scheduler's invariants
    are checked every `every` steps. At most `max_live` sequences are live. There are `replicas` engines, each
    of this size; `placement` names the policy that chooses among them. They alternate between `classes`
    numerics classes. With `kv_events` they report what enters and leaves their prefix caches. With
    `calm_lulls` no fault strikes once all requests have ended: of many engines, one would always be down.
    With `tier_pages`, each engine has a tier of so many pages, which survives it; `tier_fails` is the share
    of the tier's operations that go wrong. With `tier_shared`, engines of a numerics
    class share its pages. With `transfer` engines fetch pages from one another; `transfer_fails` is the share
    of these fetches that go wrong. `prefill` of the engines only compute prompts; with "auto" the load
    decides how many. `goal` applies to sequences without targets of their own. With `compare_service`, the
    service of the (tenant, adapter) is compared over all engines. The device has so many `stages`, which
    compute different steps, and so many `ranks` in each. `skew`: the exponent by which experts are popular, 0
    for no experts; they move between ranks if these have `spare` slots for them. With `by_load`, the load
    decides how many engines there are, from `replicas` on; with 0 replicas up to 2.
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
    tier_pages: int = 0
    tier_fails: float = 0.0
    tier_shared: bool = False
    transfer: bool = False
    transfer_fails: float = 0.0
    prefill: PrefillReplicas = 0
    calm_lulls: bool = False
    goal: LatencyTargets | None = None
    compare_service: bool = False
    by_load: bool = False
    stages: int = 1
    ranks: int = 1
    skew: float = 0.0
    spare: int | None = None


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The result of a run. Times are virtual seconds. `waits` are from arrival to first token; `paces` are
    the seconds per token after that, of each answer that ended by itself. `queries` prompt tokens were looked
    up in the prefix caches, and `hits` of them were there, `tier_hits` of these in a tier. `loads` adapters
    were loaded to a device. `moved` streams went to another replica, `changed` of them to another numerics
    class, and clients were informed of `reported` of these. `prefilled` prompts were computed by engines that
    do only that, and `transferred` pages came from other engines. `pauses` are the seconds between two deltas
    of an answer. `targeted` sequences with latency targets ended, and `good` of them met their targets.
    `fairness_gap`: see `ServiceGaps`; 0 if service was not compared."""

    scenario: Scenario
    seconds: float
    requests: int
    tokens: int
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
    tier_hits: int = 0
    loads: int = 0
    moved: int = 0
    changed: int = 0
    reported: int = 0
    targeted: int = 0
    good: int = 0
    fairness_gap: float = 0.0
    prefilled: int = 0
    transferred: int = 0
    pauses: list[float] = field(default_factory=list)
