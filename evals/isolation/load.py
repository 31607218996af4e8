"""Requests that disturb each other on one small engine. Events are drawn at random, not timed."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from msgspec.structs import replace

from personae.engine.launched import LaunchedStep
from personae.engine.plan import StepPlan
from personae.engine.scheduling.background import TieredPolicy
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
from personae.engine.stats import MAX_DRAFTS
from personae.engine.step import by_tenant
from personae.engine.tiers.tier import PageFetch, Tier
from personae.engine.worker.worker import PackedStep
from personae.evals.isolation.fixture import LONGEST, EngineFixture, ObservedStream, device_of
from personae.evals.isolation.traffic import IsolationScenario

MOST_LOSSES = 100  # of a seed: small steps may not end a prompt between two of them
MOST_IN_VAIN = 100 + LONGEST  # events: a plan in vain may have a grammar take one token of a replay


class Load:
    """Plays `logs` to their ends. `streams` has what each client received, `left` who disconnected.
    `happened` counts the disturbances. `speculate`: as `--speculate`."""

    def __init__(
        self,
        fixture: EngineFixture,
        scene: IsolationScenario,
        logs: Iterable[SequenceLog],
        dice: Random,
        speculate: str = "ngram",
        tier: Tier | None = None,
    ) -> None:
        self._fixture, self._scene, self._dice = fixture, scene, dice
        self._speculate = speculate
        self._tier = tier
        self._coming = deque(logs)
        self.streams = {log.id: ObservedStream() for log in self._coming}
        self.left: set[str] = set()
        self.happened: Counter[str] = Counter()
        self._open()

    def play(self) -> None:
        """One event after another, until nothing is left to do."""
        in_vain = 0
        while self._coming or self._live or self._queue or self._unread is not None:
            moves: list[Callable[[], bool]] = []
            if self._coming and len(self._live) < self._scene.clients:
                moves.append(self._come)
            if self._queue:
                moves.append(self._run)
            if self._unread is not None:
                moves.append(self._read)
            self._fetches += self._scheduler.take_fetches()
            if self._fetches:
                moves.append(self._fetch)
            if len(self._queue) + (self._unread is not None) < self._scene.lookahead:
                moves.append(self._plan)
            in_vain = 0 if self._dice.choice(moves)() else in_vain + 1
            assert in_vain < MOST_IN_VAIN, "nothing happens any more"
            if self._live and self._dice.random() < self._scene.leaves:
                self._leave()
            lost = self._live and self._dice.random() < self._scene.losses
            if lost and self.happened["losses"] < MOST_LOSSES:
                self._lose()
        self._scheduler.check_integrity()
        self._count()

    def _open(self) -> None:
        """An engine with nothing in it."""
        self._engine = self._fixture.engine(
            self._scene.layout, self._scene.ranks, self._speculate, self._tier
        )
        drafts = 0 if self._speculate == "off" else MAX_DRAFTS
        policy = TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters(), patience=400)
        if self._tier is not None:
            self._tier.forget_fetches()
        self._fetches: list[PageFetch] = []
        self._scheduler = Scheduler(
            self._scene.layout, policy, background=4, sharing=True, drafts=drafts, tier=self._tier
        )
        self._live: dict[str, SequenceLog] = {}
        self._held: Counter[str] = Counter()  # how many sequences hold each adapter
        self._queue: deque[StepPlan | str] = deque()  # the executor's queue: steps and releases
        self._unread: LaunchedStep | None = None

    def _come(self) -> bool:
        """The next request arrives, if there is room for its adapter."""
        log = self._coming[0]
        if log.adapter is not None:
            if not device_of(self._engine).place(self._fixture.adapters[log.adapter]):
                return False
            self._held[log.adapter] += 1
        self._live[log.id] = self._coming.popleft()
        self._scheduler.add(log, speculates=log.params.speculate)
        return True

    def _fetch(self) -> bool:
        """The tier ends a fetch, or takes too long."""
        assert self._tier is not None
        fetch = self._fetches.pop(self._dice.randrange(len(self._fetches)))
        if self._dice.random() < 0.1:
            self._scheduler.abandon_fetch(fetch.ticket)
        count = self._tier.fetch(fetch)
        self._scheduler.fetched(fetch.ticket, count)
        return True

    def _plan(self) -> bool:
        """Plan a step. Sequences whose token could not be chosen in time are planned again."""
        for id in self._engine.resumable():
            self._scheduler.resume(id)
            self.happened["deferrals"] += 1
        plan = self._scheduler.plan()
        if plan is not None:
            self._queue.append(plan)
        return plan is not None

    def _run(self) -> bool:
        """Run the next item of the executor's queue. The step before is read in parallel, if it was not read
        yet."""
        task = self._queue.popleft()
        if isinstance(task, str):
            if not self._held[task]:
                self._engine.worker.release(task)
            return True
        packed = self._engine.prepare(task, by_tenant(task, self._fixture.grammars))
        forward = self._engine.forward(packed, partial(self._overlap, packed))
        self._unread = self._engine.sample(task, forward)
        return True

    def _overlap(self, packed: PackedStep | None) -> None:
        if self._unread is not None:
            self._read()
        self._engine.fill(packed)

    def _read(self) -> bool:
        assert self._unread is not None
        result, self._unread = self._engine.finish(self._unread), None
        for delta in self._scheduler.commit(result, self._dice.choice((0.0, self._dice.uniform(0.001, 0.1)))):
            self.streams[delta.id].take(delta)
            self.happened["cached tokens"] += delta.cached or 0
            if delta.finish is not None:
                self._end(delta.id)
        return True

    def _end(self, id: str) -> None:
        adapter = self._live.pop(id).adapter
        if adapter is not None:
            self._held[adapter] -= 1
            if not self._held[adapter]:
                self._queue.append(adapter)

    def _leave(self) -> None:
        """A client disconnects."""
        id = self._dice.choice(list(self._live))
        assert self._scheduler.cancel(id)
        self._end(id)
        self.left.add(id)
        self.happened["left"] += 1

    def _lose(self) -> None:
        """The engine is lost, with everything in flight. The live sequences are submitted again with their
        logs."""
        self._count()
        for id, log in reversed(self._live.items()):
            stream = self.streams[id]
            stream.prompt_logprobs.clear()  # they are sent again
            tokens = log.tokens[: log.prompt_length] + tuple(stream.tokens)
            self._coming.appendleft(replace(log, tokens=tokens, after=None))
        self.happened["losses"] += 1
        self._open()

    def _count(self) -> None:
        """The engine's own counters."""
        self.happened["tokens from the tier"] += self._scheduler.counters.tier_hits
        self.happened["preemptions"] += self._scheduler.counters.preemptions
        self.happened["jumped tokens"] += self._scheduler.counters.jumped
        for source, accepted in self._scheduler.counters.accepted_by.items():
            self.happened[f"right drafts of {source}"] += accepted
        self.happened["adapters evicted"] += self._engine.worker.adapter_stats[2]
