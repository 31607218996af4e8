"""Observes the simulation: checks everything that must hold, as it happens.

what must hold                                            where it is checked
a sequence ends once, and produces nothing after that     `WatchedScheduler`, `Witness.delta`, `Witness.end`
tokens come in order, none is missing or repeated         `Witness.delta`, against `machine.Truth`
pages, slots, copies, adapters and KV are used as planned `machine.SimulatedDevice`
nobody reads KV of another tenant or adapter              `machine.SimulatedDevice`: it is part of every cell
the scheduler's invariants                                `Scheduler.check_integrity`, every few steps
nothing is left behind: no page, slot, pin, log, lane     `idle.py`, whenever everything has ended
two keys that both wait get the same service              `WatchedCounters`
nobody waits for longer than `longest_wait`               `Witness.delta`
only planted faults end anything                          `World._note_end`
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from personae.actors.simulation.machine import Truth
from personae.actors.simulation.service import ServiceGaps
from personae.actors.simulation.trouble import Wrong
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    FairnessKey,
    VirtualTokenCounters,
)
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, LatencyTargets, SequenceLog
from personae.engine.tiers.tier import Tier

PAIRS = 8  # pairs of keys compared at any time


@dataclass
class ObservedSequence:
    """What a client has seen of one sequence."""

    number: int
    log: SequenceLog
    truth: Truth
    came: float
    restarts: int  # of the engine core before it came
    tokens: int = 0
    ended: str | None = None
    first: float | None = None
    latest: float | None = None


@dataclass
class Witness:
    """The observations of a whole run. `now` returns virtual time. A violation raises Wrong at once.

    The first token must come within `longest_wait` seconds, plus `outage` for each restart of the engine core
    meanwhile. The scheduler's invariants are checked every `every` steps. With `gaps`, the service of the
    (tenant, adapter) is compared.
    """

    now: Callable[[], float]
    restarts: Callable[[], int]
    longest_wait: float
    outage: float
    every: int = 64
    steps: int = 0
    tokens: int = 0
    goal: LatencyTargets | None = None  # for sequences without targets of their own
    targeted: int = 0  # sequences with targets that ended; `good` of them met their targets
    good: int = 0
    gaps: ServiceGaps | None = None
    moves: int = 0  # to engines of another class, as reported to clients
    waits: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    trace: int = 0  # a checksum over everything that clients saw, and when

    def delta(self, sequence: ObservedSequence, delta: Delta) -> None:
        """Check a delta that a client has read."""
        if sequence.ended is not None:
            raise Wrong(f"sequence {delta.id} ends twice, or goes on after its end")
        for token in delta.tokens:
            expected = next(sequence.truth)
            if token != expected:
                raise Wrong(
                    f"sequence {delta.id}: token {sequence.tokens} is {token}, alone it would be {expected}"
                )
            sequence.tokens += 1
        if delta.tokens:
            if sequence.latest is not None:
                self.pauses.append(self.now() - sequence.latest)
            sequence.latest = self.now()
        self.tokens += len(delta.tokens)
        self.moves += delta.moved
        self.trace = hash((self.trace, sequence.number, len(delta.tokens), self.now()))
        if sequence.first is None and delta.tokens:
            sequence.first = self.now()
            self.waits.append(sequence.first - sequence.came)
            outages = self.restarts() - sequence.restarts
            if self.waits[-1] > self.longest_wait + outages * self.outage:
                raise Wrong(f"sequence {delta.id} has waited for {self.waits[-1]:.1f} s")
        if delta.finish is not None:
            self.end(sequence, delta.finish)
            log = sequence.log
            if delta.finish == "length" and sequence.tokens != log.params.max_tokens:
                raise Wrong(f"sequence {delta.id} ends by its length after {sequence.tokens} tokens")
            if sequence.tokens > 1 and sequence.first is not None:
                self.paces.append((self.now() - sequence.first) / (sequence.tokens - 1))

    def _in_time(self, sequence: ObservedSequence, targets: LatencyTargets) -> bool:
        if sequence.first is None:
            return False
        first = sequence.first - sequence.came
        each = (self.now() - sequence.first) / max(sequence.tokens - 1, 1)
        return targets.met(first, each)

    def end(self, sequence: ObservedSequence, how: str) -> None:
        """Note that a sequence has ended for its client."""
        if sequence.ended is not None:
            raise Wrong(f"sequence {sequence.log.id} ends twice: {sequence.ended}, then {how}")
        sequence.ended = how
        if self.gaps is not None:
            self.gaps.begin(sequence.log.id)
        targets = sequence.log.targets or self.goal
        if targets is not None and how != "left":
            self.targeted += 1
            self.good += how in ("stop", "length") and self._in_time(sequence, targets)
        self.outcomes[how] = self.outcomes.get(how, 0) + 1


class WatchedCounters(VirtualTokenCounters):
    """Virtual token counters that check the bound they promise on the service itself: while two keys both
    wait, their service differs by at most 2 max(input weight * longest input, output weight * tokens in a
    batch). Some pairs are followed at any time, each for as long as both wait."""

    def __init__(self, layout: MemoryLayout, gaps: ServiceGaps | None = None) -> None:
        super().__init__()
        batch = layout.num_pages * layout.page_size
        self._bound = 2 * max(INPUT_WEIGHT * layout.max_model_len, OUTPUT_WEIGHT * batch)
        self._partner: dict[FairnessKey, FairnessKey] = {}
        self._service: dict[FairnessKey, float] = {}  # of followed keys, since their pair was formed
        self._single: FairnessKey | None = None
        self._gaps = gaps
        self.compared = 0
        self.widest = 0.0

    def offer(self, key: FairnessKey, order: int) -> None:
        """Offer a key. A new one may be paired with the new one before it."""
        fresh = key not in self._heads
        super().offer(key, order)
        if fresh and len(self._partner) < 2 * PAIRS:
            if self._single is None:
                self._single = key
            else:
                self._partner[key], self._partner[self._single] = self._single, key
                self._service[key] = self._service[self._single] = 0.0
                self._single = None

    def withdraw(self, key: FairnessKey) -> None:
        """Withdraw a key. It is not compared any more."""
        super().withdraw(key)
        if key == self._single:
            self._single = None
        partner = self._partner.pop(key, None)
        if partner is not None:
            del self._partner[partner], self._service[key], self._service[partner]

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Charge a key, and compare its service with its partner's."""
        super().charge(key, input_tokens, output_tokens)
        if self._gaps is not None:
            self._gaps.charge(key, input_tokens, output_tokens)
        partner = self._partner.get(key)
        if partner is not None:
            self._service[key] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
            gap = abs(self._service[key] - self._service[partner])
            self.compared += 1
            self.widest = max(self.widest, gap)
            if gap > self._bound:
                raise Wrong(
                    f"{key} and {partner} both wait; their service differs by {gap}, over {self._bound}"
                )


class WatchedScheduler(Scheduler):
    """The scheduler, with checks after each call."""

    def __init__(
        self, layout: MemoryLayout, witness: Witness, tier: Tier | None = None, micro_batches: int = 1
    ) -> None:
        counters = WatchedCounters(layout, witness.gaps)
        super().__init__(layout, counters, drafts=4, tier=tier, micro_batches=micro_batches)
        self._witness = witness
        self._open: set[str] = set()

    def add(self, log: SequenceLog, *, speculates: bool = False) -> None:
        """Add a sequence."""
        super().add(log, speculates=speculates)
        self._open.add(log.id)

    def cancel(self, id: str) -> bool:
        """Cancel a sequence."""
        was = super().cancel(id)
        if was != (id in self._open):
            raise Wrong(f"the scheduler says that sequence {id} is {'live' if was else 'gone'}")
        self._open.discard(id)
        return was

    def plan(self) -> StepPlan | None:
        """Plan a step."""
        plan = super().plan()
        if plan is not None and self._witness.steps % self._witness.every == 0:
            self.check_integrity()
        if plan is not None and self._witness.gaps is not None:
            for admission in plan.admissions:
                self._witness.gaps.begin(admission.log.id)
        return plan

    def commit(self, result: StepResult, seconds: float = 0.0) -> tuple[Delta, ...]:
        """Commit a step's result."""
        deltas = super().commit(result, seconds)
        for delta in deltas:
            if delta.id not in self._open:
                raise Wrong(f"sequence {delta.id} goes on after its end")
            if delta.finish is not None:
                self._open.remove(delta.id)
        self._witness.steps += 1
        if self._witness.steps % self._witness.every == 0:
            self.check_integrity()
        return deltas
