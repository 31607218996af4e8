"""Front: the actors that hold the requests, and the client that stands before them.

The same whether Back lives in this process (`stage.py`) or in one of its own (`company.py`).
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count

import anyio
from msgspec.structs import asdict

from personae.actors.adapter_queue import AdapterQueue
from personae.actors.blackbox import LastStep
from personae.actors.client import AdapterStats, EngineStats, ModelCard
from personae.actors.inbox import Inbox
from personae.actors.ingress import Ingress
from personae.actors.kit import gauges
from personae.actors.kit.child import Incident, Report
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Fallen, Message, Shut, Submission, Withdraw
from personae.actors.streamer import Latest, Streamer
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import ActorStopped, EngineLost, PersonaeError, RestartsExhausted

IDLE_QUEUES = 64


@dataclass(frozen=True, slots=True)
class Prospectus:
    """What the client tells of the model. `models` maps the names that requests may use to their cards;
    `salt` gives a tenant's prefix-cache salt."""

    tokenizer: Tokenizer
    models: Mapping[str, ModelCard]
    max_model_len: int
    vocab_size: int
    salt: Callable[[str], bytes]


class Front:
    """Front's actors, added to a supervisor before it starts.

    `store` and `scheduler` are Back's, wherever they are. `ready` says whether Back is there.
    `max_live` bounds the sequences in the house, `window` those that an adapter may have waiting in Back.
    """

    def __init__(
        self,
        root: Supervisor,
        *,
        ready: Callable[[], bool],
        max_live: int,
        window: int,
    ) -> None:
        self._root = root
        self._house = root.supervisor("front", max_restarts=0)
        self._window = window
        self._bound = 4 * max_live  # submit, cancel, progress and refusal of every live sequence find room
        self._queues: dict[str | None, Ref[Message]] = {}
        self._idle: OrderedDict[str | None, None] = OrderedDict()
        self._numbers = count()
        self.ready = ready
        self.latest = Latest()
        self.back_actors: tuple[gauges.Gauge, ...] = ()  # those of another process, as it last told
        self.describe_back: Callable[[], None] = lambda: None
        self.lost = anyio.Event()
        self.streamer: Ref[Message] = self._house.spawn(
            "streamer", lambda: Streamer(self.ingress, self.latest), capacity=self._bound
        )
        self.ingress: Ref[Message] = self._house.spawn(
            "ingress",
            lambda: Ingress(self.streamer, self.queue_of, max_live, lambda: self.latest.backlog.seconds),
            capacity=self._bound,
        )

    def meet(self, store: Ref[Message], scheduler: Ref[Message]) -> None:
        """Say who Back's actors are; before the start."""
        self._store, self._scheduler = store, scheduler

    def queue_of(self, adapter: str | None) -> Ref[Message]:
        """The queue of an adapter (None: the base), made on first use; for telling it something now.

        Of those that have nothing to do the last `IDLE_QUEUES` are kept, so an adapter that comes up again
        and again keeps its queue, and one that never does costs nothing.
        """
        self._idle.pop(adapter, None)
        if adapter not in self._queues:
            self._queues[adapter] = self._house.spawn(
                f"queue/{next(self._numbers)}-{(adapter or 'base')[:12]}",
                lambda: AdapterQueue(
                    adapter,
                    self._store,
                    self._scheduler,
                    self.streamer,
                    self._window,
                    lambda: self._rest(adapter),
                ),
                capacity=self._bound,
            )
        return self._queues[adapter]

    def _rest(self, adapter: str | None) -> None:
        """A queue has nothing to do, and no message waits for it."""
        self._idle[adapter] = None
        if len(self._idle) > IDLE_QUEUES:
            oldest, _ = self._idle.popitem(last=False)
            self._house.dismiss(self._queues.pop(oldest))

    def note_death(self, last: LastStep | None, *, outside: bool) -> None:
        """Back has died in this step; `outside` if killed by nobody of ours. None: it had not begun a step,
        so that those who were aboard when the one before it died are still to be judged."""
        if last is not None:
            with suppress(ActorStopped):
                self.streamer.tell(Fallen(last.aboard, outside))

    def actors(self) -> list[gauges.Gauge]:
        """What every actor is doing, Back's included."""
        return [*gauges.read(self._root), *self.back_actors]

    def lose_back(self) -> None:
        """Back cannot be kept: end what lives, refuse what comes."""
        error = EngineLost("The engine has failed and does not come back; ask another replica.")
        with suppress(ActorStopped):
            self.ingress.tell(Shut(error))
        self.lost.set()


def watching(report: Report, back: str, lose_back: Callable[[], None]) -> Report:
    """`report`, and `lose_back()` when the supervisor of that path gives up."""

    def watch(incident: Incident) -> None:
        report(incident)
        if incident.path == back and isinstance(incident.error, RestartsExhausted):
            lose_back()

    return watch


class LocalClient:
    """`EngineClient` over Front's actors in this process."""

    def __init__(self, prospectus: Prospectus, front: Front) -> None:
        self._prospectus = prospectus
        self._front = front

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
        return self._prospectus.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have, prompt and answer together."""
        return self._prospectus.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self._prospectus.vocab_size

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, the base first."""
        return self._prospectus.models

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""
        return self._prospectus.salt(tenant)

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator["LocalStream"]:
        """Submit the sequences; leaving the context withdraws those that have not ended."""
        inbox = Inbox()
        ingress = self._front.ingress
        stream = LocalStream(inbox, {log.id for log in logs}, ingress)
        try:  # the asking too: one that is cancelled may have been admitted
            await ingress.ask(lambda reply: Submission(tuple(logs), inbox, reply))
            yield stream
        finally:
            stream.withdraw()

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        latest = self._front.latest
        load = latest.load
        running, waiting = latest.adapters()
        return EngineStats(
            ready=self._front.ready(),
            running=load.running,
            waiting=load.waiting,
            pages_total=load.pages_total,
            pages_used=load.pages_used,
            pages_lent=load.pages_lent,
            prefix_queries=load.prefix_queries,
            prefix_hits=load.prefix_hits,
            preemptions=load.preemptions,
            steps=load.steps,
            step_seconds=load.step_seconds,
            host_gap_seconds=load.gap_seconds,
            restarts=latest.restarts,
            page_size=load.page_size,
            fairness_gap=load.fairness_gap,
            adapters=AdapterStats(**asdict(latest.holdings), running=running, waiting=waiting),
            tokens=load.tokens,
            step_tokens=load.step_tokens,
            jumped=load.jumped,
            backlog_seconds=latest.backlog.seconds,
            spent=asdict(load.spent),
            actors=tuple(self._front.actors()),
        )

    def describe(self) -> str:
        """What every actor is doing, as a table; Back says more of itself in the log."""
        self._front.describe_back()
        return gauges.dump(self._front.actors())

    def end_all(self, error: PersonaeError) -> None:
        """End every stream with this error, and refuse new ones with it."""
        with suppress(ActorStopped):
            self._front.ingress.tell(Shut(error))

    async def lost(self) -> None:
        """Wait until the engine has failed for good. `/ready` says no by then, and requests are refused."""
        await self._front.lost.wait()


class LocalStream:
    """The deltas of one submission. An iterator and no generator: breaking out of the loop leaves nothing
    open."""

    def __init__(self, inbox: Inbox, live: set[str], ingress: Ref[Message]) -> None:
        self._inbox = inbox
        self._live = live
        self._ingress = ingress
        self._arrived: deque[Delta] = deque()

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> Delta:
        """The next delta of a sequence that is still wanted; ends when every sequence has ended."""
        while self._live:
            if not self._arrived:
                self._arrived.extend(await self._inbox.get())
            delta = self._arrived.popleft()
            if delta.id in self._live:
                if delta.finish is not None:
                    self._live.discard(delta.id)
                return delta
        raise StopAsyncIteration

    def stop(self, id: str) -> None:
        """End one sequence now; nothing more of it is delivered."""
        if id in self._live:
            self._live.discard(id)
            self._tell(Withdraw((id,)))

    def withdraw(self) -> None:
        """End all that still run."""
        if self._live:
            self._tell(Withdraw(tuple(self._live)))
            self._live.clear()

    def _tell(self, withdraw: Withdraw) -> None:
        with suppress(ActorStopped):  # the house is closed: everything in it has ended
            self._ingress.tell(withdraw)
