"""Who watches the simulation: everything that must hold, checked as it happens.

what must hold                                           where it is seen
a sequence ends once, and brings nothing after            `WatchedScheduler`, `Witness.delta`, `Witness.left`
tokens come in order, none is missing, none comes twice   `Witness.delta`, against `machine.Truth`
pages, slots, copies, adapters and KV are used as planned `machine.Device`
nobody reads KV of another tenant or adapter              `machine.Device`: it is in every cell
the books of the scheduler agree                          `Scheduler.check_integrity`, every so many steps
nothing stays behind: no page, slot, pin, log, lane       `Witness.idle`, whenever everything has ended
two keys that both wait are served alike                  `WatchedCounters`
nobody waits for longer than `longest_wait`               `Witness.delta`
nothing dies but of what was planted                      `World._note_end`
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from personae.actors.frontend.adapter_queue import AdapterQueue
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.simulation.machine import Truth
from personae.actors.simulation.trouble import Wrong
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import FairnessKey, VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, LatencyTargets, SequenceLog

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
PAIRS = 8  # of keys that are compared at any time


@dataclass
class ObservedSequence:
    """What a client has seen of one sequence."""

    number: int
    log: SequenceLog
    truth: Truth
    came: float
    restarts: int  # that the engine core had had by then
    tokens: int = 0
    ended: str | None = None
    first: float | None = None


@dataclass
class Witness:
    """What was seen of a whole run. `now` tells virtual time; a violation is raised as Wrong, there and then.

    A token comes within `longest_wait` seconds, and `outage` for each restart of the engine core meanwhile.
    `every` is how many steps of the scheduler lie between two checks of its books; 1 for all of them.
    """

    now: Callable[[], float]
    restarts: Callable[[], int]
    longest_wait: float
    outage: float
    every: int = 64
    steps: int = 0
    tokens: int = 0
    goal: LatencyTargets | None = None  # of sequences without targets of their own
    targeted: int = 0  # sequences with targets that ended, and those of them that met these
    good: int = 0
    moves: int = 0  # to engines of another class, that clients were told
    waits: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    trace: int = 0  # a checksum over all that clients saw, and when

    def delta(self, sequence: ObservedSequence, delta: Delta) -> None:
        """A client has read a delta."""
        if sequence.ended is not None:
            raise Wrong(f"sequence {delta.id} ends twice, or goes on after its end")
        for token in delta.tokens:
            expected = next(sequence.truth)
            if token != expected:
                raise Wrong(
                    f"sequence {delta.id}: token {sequence.tokens} is {token}, alone it would be {expected}"
                )
            sequence.tokens += 1
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
        return (targets.first is None or first <= targets.first) and (
            targets.token is None or each <= targets.token
        )

    def end(self, sequence: ObservedSequence, how: str) -> None:
        """A sequence is over for its client."""
        if sequence.ended is not None:
            raise Wrong(f"sequence {sequence.log.id} ends twice: {sequence.ended}, then {how}")
        sequence.ended = how
        targets = sequence.log.targets or self.goal
        if targets is not None and how != "left":
            self.targeted += 1
            self.good += how in ("stop", "length") and self._in_time(sequence, targets)
        self.outcomes[how] = self.outcomes.get(how, 0) + 1


class WatchedCounters(VirtualTokenCounters):
    """Virtual token counters, and the bound that they promise, checked on the service itself: while two keys
    both wait, what they get differs by at most 2 max(input weight * longest input, output weight * tokens in
    a batch). Some pairs are followed at any time, each for as long as both wait."""

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__(INPUT_WEIGHT, OUTPUT_WEIGHT)
        batch = layout.num_pages * layout.page_size
        self._bound = 2 * max(INPUT_WEIGHT * layout.max_model_len, OUTPUT_WEIGHT * batch)
        self._partner: dict[FairnessKey, FairnessKey] = {}
        self._service: dict[FairnessKey, float] = {}  # of followed keys, since their pair was made
        self._single: FairnessKey | None = None
        self.compared = 0
        self.widest = 0.0

    def offer(self, key: FairnessKey, order: int) -> None:
        """A key that comes to wait may be paired with the one that came before it."""
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
        """One that waits no longer is not compared any more."""
        super().withdraw(key)
        if key == self._single:
            self._single = None
        partner = self._partner.pop(key, None)
        if partner is not None:
            del self._partner[partner], self._service[key], self._service[partner]

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Compare."""
        super().charge(key, input_tokens, output_tokens)
        partner = self._partner.get(key)
        if partner is not None:
            self._service[key] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
            apart = abs(self._service[key] - self._service[partner])
            self.compared += 1
            self.widest = max(self.widest, apart)
            if apart > self._bound:
                raise Wrong(f"{key} and {partner} both wait, and are served {apart} apart of {self._bound}")


class WatchedScheduler(Scheduler):
    """The scheduler, and what must hold whenever it has done something."""

    def __init__(self, layout: MemoryLayout, witness: Witness) -> None:
        super().__init__(layout, WatchedCounters(layout), drafts=4)
        self._witness = witness
        self._open: set[str] = set()

    def add(self, log: SequenceLog, *, speculates: bool = False) -> None:
        """Take a sequence in."""
        super().add(log, speculates=speculates)
        self._open.add(log.id)

    def cancel(self, id: str) -> bool:
        """End one."""
        was = super().cancel(id)
        if was != (id in self._open):
            raise Wrong(f"the scheduler says of sequence {id} that it is {'here' if was else 'gone'}")
        self._open.discard(id)
        return was

    def plan(self) -> StepPlan | None:
        """Make a step."""
        plan = super().plan()
        if plan is not None and self._witness.steps % self._witness.every == 0:
            self.check_integrity()
        return plan

    def commit(self, result: StepResult, seconds: float = 0.0) -> tuple[Delta, ...]:
        """Take a step's result."""
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


def idle(actors: dict[str, object], epoch: int) -> None:
    """Nothing may have stayed behind in the actors, by path, when every request has ended. Raises Wrong."""
    for path, actor in actors.items():
        for name, left in vars(actor).items():
            if name in _EMPTY_WHEN_IDLE and isinstance(left, dict | set) and left:
                raise Wrong(f"all have ended, and {path} still has {name} {left!r}")
        if (
            isinstance(actor, AdapterQueue)
            and actor._adapter is not None
            and actor._epoch == epoch  # a queue that nobody has used since does not know of a new life
            and (actor._pinned or actor._pinning)
        ):
            raise Wrong(f"all have ended, and {path} still pins its adapter")


def nothing_left(replicas: ReplicaSet) -> None:
    """Nothing may have stayed in the dispatcher, and nothing be promised to a replica. Raises Wrong."""
    dispatcher = replicas._dispatcher
    left = {
        "sequences": dispatcher._live,
        "keys": dispatcher._keys,
        "waiting": dispatcher._waiting,
        "demand": dispatcher._waiting.demand,
        "prompts": dispatcher._waiting.prompts,
        "returning": dispatcher._returning,
        "withdrawn": dispatcher._withdrawn,
        "draining": dispatcher._draining,
        "suspects": None if dispatcher._suspects.over else dispatcher._suspects,
    }
    for replica in replicas.replicas.values():
        name = f"of engine {replica.index}"
        left |= {f"live {name}": replica.live, f"work {name}": replica.work}
        left |= {f"demand {name}": replica.demand, f"waiting {name}": replica._waiting}
        left |= {f"tenants {name}": replica._tenants, f"prompts {name}": replica._prompts}
    for name, value in left.items():
        if value:
            raise Wrong(f"all have ended, and the dispatcher still has {name}: {value!r}")


_EMPTY_WHEN_IDLE = {
    "_live", "_adapter_of", "_withdrawn", "_lanes", "_on_device", "_refused", "_known", "_compiling",
    "_grammars", "_placed", "_queue", "_tried", "_held", "_on_trial",
}  # fmt: skip
