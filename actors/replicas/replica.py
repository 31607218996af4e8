"""One replica as the dispatcher sees it: the work that it was promised, and what it has cached."""

from collections import Counter, OrderedDict
from enum import Enum, auto
from itertools import islice
from typing import TypeVar

from personae.actors.frontend.live_stream import LiveStream
from personae.actors.replicas.exact import ExactPrefixes
from personae.actors.replicas.frontend import ReplicaFrontend
from personae.actors.replicas.prefixes import BLOCK, PrefixIndex
from personae.actors.replicas.waiting import Group
from personae.actors.wire import Facts
from personae.engine.numerics import NumericsClass
from personae.engine.scheduling.fairness import FairnessKey

ADAPTERS = 4096  # whose last use is remembered
STEPS = 2  # steps' worth of prompt tokens that one key may have waiting at a replica
RECENT = 64  # sent blocks that are taken as cached before the replica reports them
BACKGROUND = 8  # background requests get this many times less room
FIRST_STEP_TOKEN = 1e-4  # seconds per token, until a step was measured
FIRST_LOAD = {"host": 0.005, "disk": 0.05}  # seconds to load an adapter, until one was measured


_Key = TypeVar("_Key")


class ReplicaState(Enum):
    """Whether a replica serves."""

    STARTING = auto()  # or restarting
    UP = auto()
    DRAINING = auto()  # about to be removed
    LOST = auto()


class Placed:
    """A sequence, and the work that it means for its replica: `prompt` tokens until it is admitted, `answer`
    tokens until it ends. `charged` counts the emitted tokens that fairness has charged."""

    __slots__ = ("admitted", "answer", "charged", "key", "prompt", "replica", "stream")

    def __init__(self, stream: LiveStream, key: FairnessKey) -> None:
        self.stream = stream
        self.key = key
        self.replica: Replica | None = None
        self.admitted = False
        self.prompt = self.answer = 0
        self.charged = 0


class Replica:
    """A step of this replica has at most `seqs` sequences and `batch` tokens; the engine core reports both
    when it has loaded. With `prefill` it only computes prompts, while others go on with the answers. Other
    engines ask for its pages at `page_address`."""

    def __init__(
        self,
        index: int,
        frontend: ReplicaFrontend,
        *,
        prefill: bool = False,
    ) -> None:
        self.index = index
        self.prefill = prefill
        self.page_address: str | None = None
        self.frontend = frontend
        self.state = ReplicaState.STARTING
        self.seqs = 64
        self.batch = 512
        self.numerics = NumericsClass()
        self.live: dict[str, Placed] = {}
        self.work = 0  # promised tokens that are not computed yet
        self.prefixes = PrefixIndex()
        self.exact: ExactPrefixes | None = None
        self.demand: Counter[str | None] = Counter()  # work by adapter
        self._used: OrderedDict[str, None] = OrderedDict()  # adapters, the most recently used last
        self._waiting = 0  # sequences that are not admitted yet
        self._tenants: Counter[str] = Counter()  # of the waiting sequences
        self._prompts: Counter[FairnessKey] = Counter()  # their prompt tokens

    @property
    def up(self) -> bool:
        """Whether it serves."""
        return self.state is ReplicaState.UP

    def loaded(self, facts: Facts) -> None:
        """Take the limits that its engine core reported."""
        self.seqs, self.batch = facts.max_seqs, facts.max_batch_tokens
        self.numerics = facts.numerics
        self.page_address = facts.page_address

    def has_room(self, key: FairnessKey) -> bool:
        """Whether one more request of this key may wait there. Each tenant may have a few: so the engine
        always has a choice, and a tenant that floods fills no replica."""
        tokens = self._prompts[key]
        if tokens and tokens >= STEPS * self.batch // (BACKGROUND if key.background else 1):
            return False
        return self.takes_turns(key)

    def takes_turns(self, key: FairnessKey) -> bool:
        """Whether fewer requests wait there than it can compute at once, or none of this tenant."""
        return self._waiting < self.seqs or not self._tenants[key.tenant]

    def say_exactly(self) -> ExactPrefixes:
        """Use the replica's own reports of its cache from now on, and guess only for the latest prompts."""
        self.prefixes = PrefixIndex(RECENT)
        self.exact = ExactPrefixes()
        return self.exact

    def uncached(self, group: Group) -> int:
        """How many tokens of the prompt it has to compute."""
        cached = self.prefixes.match(group.blocks)
        if self.exact is not None and self.exact.block_size:
            cached = max(cached, self.exact.match(group.names(self.exact.block_size)))
        return max(group.prompt - cached, 1)

    @property
    def waiting(self) -> int:
        """How many of its sequences are not admitted yet."""
        return self._waiting

    @property
    def waiting_prompts(self) -> int:
        """How many prompt tokens of sequences that are not admitted yet it has to compute."""
        return self._prompts.total()

    @property
    def token_seconds(self) -> float:
        """How much longer one more token makes a step, as measured."""
        return self.frontend.latest.token_seconds or FIRST_STEP_TOKEN

    @property
    def prompt_token_seconds(self) -> float:
        """How much longer one more prompt token makes a step, as measured."""
        return self.frontend.latest.prompt_token_seconds or FIRST_STEP_TOKEN

    @property
    def queue_seconds(self) -> float:
        """How long until a new prompt's turn comes: the prompts that wait before it, the running sequences in
        each of their steps, and the answers that have to end before it gets a slot."""
        over = max(len(self.live) + 1 - self.seqs, 0)
        prompts = self.waiting_prompts
        rows = (1 + prompts / self.batch) * (len(self.live) - self._waiting)
        return (prompts + rows + over * self.work / max(self.seqs, 1)) * self.token_seconds

    def load_seconds(self, adapter: str | None) -> float:
        """How long until this adapter is on the device, as measured for the place where it probably is."""
        if adapter is None:
            return 0.0
        stats, used = self.frontend.latest.adapter_stats, adapter in self._used
        if used and adapter in islice(reversed(self._used), max(stats.device, 1)):
            return 0.0
        source = "host" if stats.host and used else "disk"
        loads = stats.loads.get(source, 0.0)
        return stats.load_seconds.get(source, 0.0) / loads if loads else FIRST_LOAD[source]

    def first_token_seconds(self, group: Group) -> float:
        """How long until the first token of a group that is sent there now."""
        # the adapter loads while the prompts before this one are computed
        waits = max(self.queue_seconds, self.load_seconds(group.key.adapter))
        return waits + self.uncached(group) * self.token_seconds

    def takes_along(self, group: Group) -> bool:
        """Whether its steps can compute the group's prompt together with their answers: it makes a step take
        at most twice as long, as measured."""
        tokens, seconds = self.uncached(group), self.step_seconds
        return tokens * self.prompt_token_seconds <= seconds if seconds else tokens <= BLOCK

    @property
    def step_seconds(self) -> float:
        """How long a step would take with one more sequence, as measured; 0 until a step was measured."""
        return self.frontend.latest.step_seconds(len(self.live) + 1)

    def promise(self, group: Group, placed: list[Placed]) -> None:
        """Note that the group is sent there."""
        prompt = self.uncached(group)
        self.prefixes.note(group.blocks)
        if group.key.adapter is not None:
            self._used[group.key.adapter] = None
            self._used.move_to_end(group.key.adapter)
            if len(self._used) > ADAPTERS:
                self._used.popitem(last=False)
        for each in placed:
            each.replica, each.admitted = self, False
            each.prompt, each.answer = prompt, group.answer
            prompt = 0  # the followers share it
            self.live[each.stream.log.id] = each
            self._waiting += 1
            self._tenants[each.key.tenant] += 1
            self._prompts[each.key] += each.prompt
            self._add_work(each, each.prompt + each.answer)

    def admit(self, id: str) -> None:
        """Note that a sequence is computed from now on."""
        placed = self.live.get(id)
        if placed is not None and not placed.admitted:
            self._admit(placed)

    def release(self, placed: Placed) -> None:
        """Remove a sequence that has ended or left this replica."""
        if not placed.admitted:
            self._admit(placed)
        self._add_work(placed, -placed.answer)
        placed.replica = None
        del self.live[placed.stream.log.id]

    def forget(self) -> None:
        """Its engine core has died: nothing is cached there any more."""
        self.prefixes.clear()
        if self.exact is not None:
            self.exact.names.clear()
        self._used.clear()

    def _admit(self, placed: Placed) -> None:
        placed.admitted = True
        self._waiting -= 1
        _subtract(self._tenants, placed.key.tenant, 1)
        _subtract(self._prompts, placed.key, placed.prompt)
        self._add_work(placed, -placed.prompt)
        placed.prompt = 0

    def _add_work(self, placed: Placed, tokens: int) -> None:
        self.work += tokens
        self.demand[placed.key.adapter] += tokens
        if not self.demand[placed.key.adapter]:
            del self.demand[placed.key.adapter]


def _subtract(counter: Counter[_Key], name: _Key, count: int) -> None:
    counter[name] -= count
    if not counter[name]:
        del counter[name]
