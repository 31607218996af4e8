"""The frontend: the actors that hold the requests, and the client that talks to them.

It is the same whether the engine core lives in this process (`in_process.py`) or in one of its own
(`multi_process.py`).
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import anyio
from msgspec.structs import asdict

from personae.actors.client import EngineStats, ModelCard
from personae.actors.enginecore.step_recorder import LastStep
from personae.actors.frontend.adapter_queue import AdapterQueue
from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.ingress import Ingress
from personae.actors.frontend.queue_stats import by_adapter
from personae.actors.frontend.streamer import LatestStats, Streamer
from personae.actors.kit import gauges
from personae.actors.kit.child import Incident, ReportIncident
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    EngineDied,
    KeepLoaded,
    KeepSession,
    Message,
    Shutdown,
    Submission,
    Withdraw,
)
from personae.engine.scheduling.kv_events import KVEvent
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import ActorStopped, EngineLost, PersonaeError, RestartsExhausted

IDLE_QUEUES = 64


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the client reports about the model. `models` maps the names that requests may use to their cards;
    `salt` returns a tenant's prefix-cache salt."""

    tokenizer: Tokenizer
    models: Mapping[str, ModelCard]
    max_model_len: int
    vocab_size: int
    salt: Callable[[str], bytes]


class Frontend:
    """The frontend's actors, added to a supervisor before it starts.

    `ready` says whether the engine core serves. `max_live` bounds the sequences that are served at once.
    `window` bounds the sequences of one adapter and tenant that wait in the engine core.
    """

    def __init__(
        self,
        root: Supervisor,
        *,
        ready: Callable[[], bool],
        max_live: int,
        window: int,
        name: str = "frontend",
    ) -> None:
        self._root = root
        self._supervisor = root.supervisor(name, max_restarts=0)
        self._max_live = max_live
        self._window = window
        self._bound = 4 * max_live  # room for a submit, cancel, progress and refusal of each live sequence
        self._queues: dict[str | None, Ref[Message]] = {}
        self._idle: OrderedDict[str | None, None] = OrderedDict()
        self._numbers = count()
        self.ready = ready
        self.latest = LatestStats()
        self.core_actors: tuple[gauges.Gauge, ...] = ()  # of the engine core's process, as it last reported
        self.describe_core: Callable[[], None] = lambda: None
        self.on_kv_events: Callable[[tuple[KVEvent, ...]], None] = lambda events: None
        self.lost = anyio.Event()
        self._kept_loaded = KeepLoaded(())
        self.streamer: Ref[Message] = self._supervisor.spawn(
            "streamer", self._make_streamer, capacity=self._bound
        )
        self.ingress: Ref[Message] = self._supervisor.spawn(
            "ingress", self._make_ingress, capacity=self._bound
        )

    def _make_streamer(self) -> Streamer:
        return Streamer(self.ingress, self.latest)

    def _make_ingress(self) -> Ingress:
        return Ingress(
            self.streamer,
            self.queue_of,
            self._max_live,
            lambda: self.latest.backlog.seconds,
            on_started=self.engine_started,
        )

    def connect(self, store: Ref[Message], scheduler: Ref[Message]) -> None:
        """Set the engine core's actors. Call this before the start."""
        self._store, self._scheduler = store, scheduler

    def queue_of(self, adapter: str | None) -> Ref[Message]:
        """Return the queue of an adapter (None: the base), created on first use. Send to it at once: an idle
        queue may be removed.

        The last `IDLE_QUEUES` idle queues are kept. So an adapter that is used again and again keeps its
        queue, and one that is not used again costs nothing.
        """
        self._idle.pop(adapter, None)
        if adapter not in self._queues:
            self._queues[adapter] = self._supervisor.spawn(
                f"queue/{next(self._numbers)}-{(adapter or 'base')[:12]}",
                lambda: AdapterQueue(
                    adapter,
                    self._store,
                    self._scheduler,
                    self.streamer,
                    self._window,
                    lambda: self._retire(adapter),
                ),
                capacity=self._bound,
            )
        return self._queues[adapter]

    def _retire(self, adapter: str | None) -> None:
        """Note that a queue is idle: it has nothing to do, and no message waits for it."""
        self._idle[adapter] = None
        if len(self._idle) > IDLE_QUEUES:
            oldest, _ = self._idle.popitem(last=False)
            self._supervisor.dismiss(self._queues.pop(oldest))

    def note_engine_death(self, last: LastStep | None, *, outside: bool) -> None:
        """Note that the engine core died in step `last`. `outside` says that something other than this server
        killed it. If `last` is None, the engine core had not begun a step: the sequences of the crash before
        it stay under suspicion."""
        if last is not None:
            with suppress(ActorStopped):
                self.streamer.tell(EngineDied(last.on_device, outside))

    def stats(self) -> EngineStats:
        """Return what the engine is doing now."""
        latest = self.latest
        queues = latest.queues()
        running, waiting = by_adapter(queues)
        return EngineStats(
            **asdict(latest.stats),
            ready=self.ready(),
            restarts=latest.restarts,
            backlog_seconds=latest.backlog.seconds,
            adapters=latest.adapter_stats,
            adapter_running=running,
            adapter_waiting=waiting,
            queues=queues,
            recent_steps=tuple(latest.recent_steps),
            actors=tuple(self.actors()),
        )

    def keep_session(self, message: KeepSession) -> None:
        """Tell the engine core. One that is not running keeps no pages."""
        with suppress(ActorStopped):
            self._scheduler.tell(message)

    def keep_loaded(self, message: KeepLoaded) -> None:
        """Tell the engine core, and each that is started later."""
        if message != self._kept_loaded:
            self._kept_loaded = message
            with suppress(ActorStopped):  # one that is not running gets it when it starts
                self._store.tell(message)

    def engine_started(self) -> None:
        """Tell a new engine core what it must know beforehand."""
        if self._kept_loaded.adapters:
            self._store.tell(self._kept_loaded)

    def actors(self) -> list[gauges.Gauge]:
        """Return what every actor is doing, the engine core's included."""
        return [*gauges.read(self._root), *self.core_actors]

    def lose_engine(self) -> None:
        """End all streams and refuse new ones: the engine core will not be started again."""
        error = EngineLost("The engine has failed and will not be restarted; ask another replica.")
        with suppress(ActorStopped):
            self.ingress.tell(Shutdown(error))
        self.lost.set()


def watch_restarts(report: ReportIncident, core: str, lose_engine: Callable[[], None]) -> ReportIncident:
    """Return a `ReportIncident` that passes incidents on to `report`, and calls `lose_engine` when the
    supervisor at path `core` gives up."""

    def watch(incident: Incident) -> None:
        report(incident)
        if incident.path == core and isinstance(incident.error, RestartsExhausted):
            lose_engine()

    return watch


class Serving(Protocol):
    """What a client talks to: the frontend of one engine, or the dispatcher of several."""

    ingress: Ref[Message]
    describe_core: Callable[[], None]
    lost: anyio.Event

    def stats(self) -> EngineStats:
        """Return what the engine is doing now."""

    def keep_session(self, message: KeepSession) -> None:
        """Tell every engine core."""

    def keep_loaded(self, message: KeepLoaded) -> None:
        """Tell every engine core, and each that is started later."""

    def actors(self) -> list[gauges.Gauge]:
        """Return what every actor is doing."""


class LocalClient:
    """`EngineClient` over the frontend's actors in this process."""

    def __init__(self, model_info: ModelInfo, frontend: Serving) -> None:
        self._model_info = model_info
        self._frontend = frontend

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
        return self._model_info.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have, prompt and answer together."""
        return self._model_info.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self._model_info.vocab_size

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, with the base first."""
        return self._model_info.models

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""
        return self._model_info.salt(tenant)

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator["LocalStream"]:
        """Submit the sequences. Leaving the context withdraws the unfinished ones."""
        inbox = Inbox()
        stream = LocalStream(inbox, {log.id for log in logs}, self._frontend.ingress)
        try:  # `submit` too: if it is cancelled, the sequences may have been admitted
            await self.submit(logs, inbox)
            yield stream
        finally:
            stream.withdraw()

    async def submit(self, logs: Sequence[SequenceLog], inbox: Inbox) -> None:
        """Submit sequences whose deltas go to `inbox`, until they end or are withdrawn. Raises Overloaded
        when the engine is full."""
        await self._frontend.ingress.ask(lambda reply: Submission(tuple(logs), inbox, reply))

    def withdraw(self, ids: Sequence[str]) -> None:
        """End sequences that were submitted. Those that have ended already are ignored."""
        with suppress(ActorStopped):  # the frontend has stopped, and every sequence with it
            self._frontend.ingress.tell(Withdraw(tuple(ids)))

    def keep_session(self, tenant: str, session: str, seconds: float) -> None:
        """Keep the pages of a tenant's session for so long from now on; 0: no longer."""
        self._frontend.keep_session(KeepSession(tenant, session, seconds))

    def forget_session(self, tenant: str, session: str) -> None:
        """Delete the pages of a tenant's session that nobody else uses, in memory and in the tier."""
        self._frontend.keep_session(KeepSession(tenant, session, 0.0, forget=True))

    def keep_loaded(self, adapters: Sequence[str]) -> None:
        """Load the adapters of these digests, and keep them on the device until the next call."""
        self._frontend.keep_loaded(KeepLoaded(tuple(adapters)))

    def stats(self) -> EngineStats:
        """Return what the engine is doing now."""
        return self._frontend.stats()

    def describe(self) -> str:
        """Return a table of what every actor is doing. The engine core writes more about itself to the
        log."""
        self._frontend.describe_core()
        return gauges.dump(self._frontend.actors())

    def end_all(self, error: PersonaeError) -> None:
        """End every stream with this error, and refuse new ones with it."""
        with suppress(ActorStopped):
            self._frontend.ingress.tell(Shutdown(error))

    async def lost(self) -> None:
        """Wait until the engine has failed for good. From then on `/ready` fails, and requests are
        refused."""
        await self._frontend.lost.wait()


class LocalStream:
    """The deltas of one submission. It is an iterator, not a generator: breaking out of the loop leaves
    nothing open."""

    def __init__(self, inbox: Inbox, live: set[str], ingress: Ref[Message]) -> None:
        self._inbox = inbox
        self._live = live
        self._ingress = ingress
        self._arrived: deque[Delta] = deque()

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta of a sequence that is still wanted. Iteration ends when every sequence has
        ended."""
        while self._live:
            if not self._arrived:
                self._arrived.extend(await self._inbox.get())
            delta = self._arrived.popleft()
            if delta.id in self._live:
                if delta.finish is not None:
                    self._live.discard(delta.id)
                return delta
        raise StopAsyncIteration

    def take_at_once(self, take: Callable[[Delta], bool]) -> None:
        """As `SequenceStream`."""
        self._inbox.at_once = take

    def stop(self, id: str) -> None:
        """End one sequence now. No more deltas of it are delivered."""
        if id in self._live:
            self._live.discard(id)
            self._tell(Withdraw((id,)))

    def withdraw(self) -> None:
        """End all sequences that still run."""
        if self._live:
            self._tell(Withdraw(tuple(self._live)))
            self._live.clear()

    def _tell(self, withdraw: Withdraw) -> None:
        with suppress(ActorStopped):  # the frontend has stopped, and every sequence with it
            self._ingress.tell(withdraw)
