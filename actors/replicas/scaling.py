"""Adds and removes replicas while the others serve.

A replica that is removed drains first: it gets no new requests, and its streams have some time to end. The
streams that are left move to other replicas, as when an engine dies, but none becomes a suspect. Then its
process ends.
"""

import logging
from collections.abc import Callable
from typing import Literal

import anyio
import msgspec
from anyio import CancelScope, move_on_after

from personae.actors.frontend.supervised_engine import SupervisedEngine
from personae.actors.kit.actor import Actor
from personae.actors.kit.child import Incident
from personae.actors.kit.mailbox import Ref, Reply
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Drain, HandOver, Message, NoEngine
from personae.actors.process import Launch
from personae.actors.replicas.replica import Replica, ReplicaState
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.replicas.source import ReplicaSource
from personae.actors.wire import Facts
from personae.engine.scheduling.kv_events import KVEvent
from personae.errors import Overloaded, PersonaeError, RequestError

log = logging.getLogger("personae.actors")

DRAIN_SECONDS = 30.0
LINGER_SECONDS = 2.0  # that an engine stays after its streams have moved, so that their pages can follow
FAILURES = 16  # failed additions that `list` still shows
RETRY_SECONDS = 10.0  # after the only engine could not be started, requests get its error for so long

Status = Literal["starting", "ready", "draining", "failed"]
Role = Literal["both", "prefill", "decode"]
_STATUS: dict[ReplicaState, Status] = {
    ReplicaState.STARTING: "starting",
    ReplicaState.UP: "ready",
    ReplicaState.DRAINING: "draining",
    ReplicaState.LOST: "failed",
}


HearKVEvents = Callable[[int, tuple[KVEvent, ...]], None]
"""Receives the number of an engine, and what entered and left its prefix cache."""


class ReplicaInfo(msgspec.Struct, frozen=True):
    """A replica as operators see it. `running` sequences are being computed; `waiting` ones were sent there
    and are not computed yet. `error` says why a failed one failed. A `role` other than "both" says that some
    replicas only compute prompts, and whether this is one of them."""

    id: int
    status: Status
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    error: str | None = None
    role: Role = "both"


class Scale(Message, frozen=True):
    """To the scaler: have `count` replicas. It replies as soon as the change has begun."""

    count: int
    drain_seconds: float
    reply: Reply[None]


class ReplicaScaler:
    """Starts and ends the replicas' engines. `make_engine` makes a replica's engine, given how to start its
    process. `on_kv_events` receives the events of their prefix caches."""

    def __init__(
        self,
        root: Supervisor,
        replicas: ReplicaSet,
        source: ReplicaSource,
        make_engine: Callable[[int, Launch], SupervisedEngine],
        on_kv_events: HearKVEvents | None = None,
    ) -> None:
        self._root = root
        self._replicas = replicas
        self._source = source
        self._make_engine = make_engine
        self._on_kv_events = on_kv_events
        self._members: dict[int, tuple[Replica, SupervisedEngine]] = {}
        self._failures: dict[int, str] = {}
        self.max_model_len = 0  # what clients were promised; a new engine must allow as much
        self._actor: Ref[Message] = root.spawn("scaler", lambda: Scaler(self))

    @property
    def engines(self) -> list[SupervisedEngine]:
        """The engines of all replicas."""
        return [engine for _, engine in self._members.values()]

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, in any state, until their process has ended."""
        return [replica for replica, _ in self._members.values()]

    @property
    def dispatcher(self) -> Ref[Message]:
        """The actor that sends them streams."""
        return self._replicas.ingress

    @property
    def least(self) -> int:
        """How many replicas there must be."""
        return 0 if self._replicas.wakes else 1

    @property
    def most(self) -> int:
        """How many replicas there may be."""
        return self._source.most

    def notes(self, incident: Incident) -> bool:
        """Note an incident below the root. Returns whether to report it."""
        return all(engine.notes(incident) for engine in self.engines)

    async def scale(self, count: int, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Have `count` replicas: start some, or drain some. Returns when that has begun. Raises RequestError
        for an impossible count."""
        await self._actor.ask(lambda reply: Scale(count, drain_seconds, reply))

    def list(self) -> list[ReplicaInfo]:
        """Every replica, and those that could not be added."""
        infos = [ReplicaInfo(id, "failed", error=error) for id, error in self._failures.items()]
        apart = any(replica.prefill for replica in self.replicas)
        for replica in self.replicas:
            stats = replica.frontend.stats()
            role: Role = "prefill" if replica.prefill else "decode" if apart else "both"
            infos.append(
                ReplicaInfo(
                    replica.index,
                    _STATUS[replica.state],
                    len(replica.live) - replica.waiting,
                    replica.waiting,
                    max(stats.restarts, 0),
                    "It failed too often." if replica.state is ReplicaState.LOST else None,
                    role,
                )
            )
        return sorted(infos, key=lambda info: info.id)

    def add(self) -> tuple[Replica, SupervisedEngine]:
        """Make a replica and its engine, which is not started yet. Raises Conflict if no place is free."""
        index = self._replicas.next_index
        engine = self._make_engine(index, self._source.acquire(index))
        replica = self._replicas.add(engine.is_up)
        self._members[index] = replica, engine
        engine.serve(replica.frontend)
        if self._on_kv_events is not None:
            exact, hear = replica.say_exactly(), self._on_kv_events

            def on_events(events: tuple[KVEvent, ...]) -> None:
                exact.hear(events)
                hear(index, events)

            replica.frontend.on_kv_events = on_events

        def loaded(facts: Facts) -> None:
            self._replicas.cold_start.end(serves=True)
            replica.loaded(facts)
            self._compare(replica)
            if facts.max_model_len < self.max_model_len:  # so it never gets a request
                replica.state = ReplicaState.DRAINING

        engine.on_loaded = loaded
        return replica, engine

    def _compare(self, replica: Replica) -> None:
        """Warn if an engine's numerics differ from those of the others."""
        others = (other for other in self.replicas if other is not replica and other.up)
        other = next(others, replica)
        if differing := replica.numerics.differences(other.numerics):
            log.warning(
                "engine %d may compute other tokens than engine %d (%s); answers that move there report it",
                replica.index,
                other.index,
                ", ".join(differing),
            )

    def start(self, engine: SupervisedEngine) -> None:
        """Start an engine. It loads from now on."""
        self._replicas.cold_start.begin()
        engine.add_to(self._root)

    async def remove(self, replica: Replica) -> None:
        """End a replica that has no streams, and its engine."""
        self._replicas.remove(replica)
        _, engine = self._members[replica.index]
        await engine.end()
        await replica.frontend.close()
        del self._members[replica.index]
        self._source.release(replica.index)

    def forget_failures(self) -> None:
        """Forget the failed additions of earlier requests."""
        self._failures.clear()

    def note_failure(self, replica: Replica, error: PersonaeError) -> None:
        """Note that a replica could not be added."""
        log.error("engine %d could not be added: %s", replica.index, error)
        self._replicas.cold_start.end(serves=False)
        self._failures[replica.index] = error.message
        while len(self._failures) > FAILURES:
            del self._failures[next(iter(self._failures))]
        if all(other.state is ReplicaState.DRAINING for other in self.replicas):
            why = f"No engine could be started: {error.message}"
            self.dispatcher.tell(NoEngine(Overloaded(why, code="no_engine", retry_after=RETRY_SECONDS)))


class Scaler(Actor[Message]):
    """Adds and removes replicas, one request at a time. Starting and draining run in the background."""

    def __init__(self, replicas: ReplicaScaler) -> None:
        self._replicas = replicas
        self._starting: dict[int, CancelScope] = {}

    async def receive(self, message: Message) -> None:
        """Begin what the message asks for."""
        assert isinstance(message, Scale)
        try:
            await self._scale(message.count, message.drain_seconds)
        except RequestError as error:
            message.reply.fail(error)
        else:
            message.reply.tell(None)

    async def _scale(self, count: int, drain_seconds: float) -> None:
        replicas = self._replicas
        if not replicas.least <= count <= replicas.most:
            raise RequestError(
                f"`replicas` is {count}; it must be from {replicas.least} to {replicas.most} (--replicas).",
                param="replicas",
            )
        for replica in replicas.replicas:
            if replica.state is ReplicaState.LOST:  # it has no process, so this takes no time
                await self._take_down(replica, 0.0)
        replicas.forget_failures()
        kept = [one for one in replicas.replicas if one.state is not ReplicaState.DRAINING]
        added: list[tuple[Replica, SupervisedEngine]] = []
        try:
            while len(kept) + len(added) < count:
                added.append(replicas.add())
        except RequestError:
            for replica, _ in added:
                await replicas.remove(replica)
            raise
        # Engines that do not serve yet go first, then the ones with the fewest streams. Prefill engines go
        # last: there are few of them, and they never have many streams.
        kept.sort(key=lambda one: (one.up, one.prefill, len(one.live), -one.index))
        for replica in kept[: max(len(kept) - count, 0)]:
            replica.state = ReplicaState.DRAINING
            self.start_soon(self._take_down, replica, drain_seconds)
        for replica, engine in added:
            # start it before anything else can happen, so that a removal finds something to end
            replicas.start(engine)
            self._starting[replica.index] = CancelScope()
            self.start_soon(self._bring_up, replica, engine)

    async def _bring_up(self, replica: Replica, engine: SupervisedEngine) -> None:
        with self._starting[replica.index]:
            try:
                await engine.loaded()
                self._check(engine)
            except PersonaeError as error:
                # before others can know of it: from then on it does not count
                replica.state = ReplicaState.DRAINING
                self._replicas.note_failure(replica, error)
                self.start_soon(self._take_down, replica, 0.0)
            else:
                log.info("engine %d serves", replica.index)
        del self._starting[replica.index]

    def _check(self, engine: SupervisedEngine) -> None:
        most, promised = engine.facts.max_model_len, self._replicas.max_model_len
        if most < promised:
            raise RequestError(f"It has memory for sequences of {most} tokens; the others allow {promised}.")

    async def _take_down(self, replica: Replica, seconds: float) -> None:
        if (scope := self._starting.get(replica.index)) is not None:
            scope.cancel()
        dispatcher = self._replicas.dispatcher
        drained = anyio.Event()
        dispatcher.tell(Drain(replica.index, drained))
        with move_on_after(seconds):
            await drained.wait()
        if not drained.is_set():
            dispatcher.tell(HandOver(replica.index))
            await drained.wait()
            if replica.page_address is not None:
                await anyio.sleep(LINGER_SECONDS)
        await self._replicas.remove(replica)
        log.info("engine %d is removed", replica.index)
