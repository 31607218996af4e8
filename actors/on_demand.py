"""Engines that run only while they are needed, within a memory that they share.

An engine starts with the first request for it. It stops when another needs its memory, or after a time
without requests. Requests for an engine that does not run wait for it; requests for others do not notice.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, Literal, Protocol, TypeVar

import anyio

from personae.actors.client import EngineClient, EngineStats, ModelCard, SequenceStream
from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import Overloaded, PersonaeError

EngineState = Literal["asleep", "waiting", "starting", "running", "failed"]

START_SECONDS = 600.0  # how long a request waits for its engine
RETRY_SECONDS = 10.0  # after a failed start, requests get its error for so long
MAX_WAITING = 256  # requests for each engine

_log = logging.getLogger("personae.engine")


class Running(Protocol):
    """An engine that runs. `lost` waits until it has failed for good."""

    @property
    def client(self) -> EngineClient:
        """What requests are sent to."""

    @property
    def lost(self) -> Callable[[], Awaitable[None]]:
        """Wait until the engine has failed for good."""


R = TypeVar("R", bound=Running)


class EngineMemory:
    """The memory of several engines, in bytes: an engine that starts takes its size, and gives it back when
    it has stopped. Engines that start take turns. The least recently used ones stop to make room, first those
    without requests; one with requests finishes them, and new ones wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.engines: list[OnDemandEngine[Running]] = []
        self._taken: dict[object, int] = {}
        self._turn = anyio.Lock()
        self._change = anyio.Event()

    @property
    def free(self) -> int:
        """Bytes that no engine has."""
        return self.limit - sum(self._taken.values())

    def notify(self) -> None:
        """Something has changed for which an engine or a request may wait."""
        self._change.set()
        self._change = anyio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._change.wait()

    @asynccontextmanager
    async def room(self, engine: "OnDemandEngine[R]") -> AsyncIterator[None]:
        """Have room for an engine while the block runs."""
        async with self._turn:
            while self.free < engine.size:
                self._retire(engine.size - self.free)
                await self.changed()
            self._taken[engine] = engine.size
        try:
            yield
        finally:
            del self._taken[engine]
            self.notify()

    def _retire(self, wanted: int) -> None:
        """Have engines stop until so many bytes more will be free."""
        wanted -= sum(each.size for each in self.engines if each.retiring)
        free_first = sorted(self.engines, key=lambda each: (each.users > 0, each.last_used))
        for each in free_first:
            if wanted > 0 and each.may_retire:
                each.retire()
                wanted -= each.size


class OnDemandEngine(Generic[R]):
    """An `EngineClient` whose engine runs while it is needed, within `run`.

    `open` starts an engine, which takes `size` bytes of `memory`. It stops `keep_alive` seconds after its
    last request; None: only for its memory. Its tokenizer, its names and its limits are those of its last
    start, so it must have been started once before they are asked for.
    """

    def __init__(
        self,
        name: str,
        size: int,
        open: Callable[[], AbstractAsyncContextManager[R]],
        memory: EngineMemory,
        keep_alive: float | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self.users = 0
        self.starts = 0
        self._failures = 0
        self.last_used = -math.inf
        self.retiring = False
        self._open = open
        self._memory = memory
        self._keep_alive = math.inf if keep_alive is None else keep_alive
        self._waiting = 0
        self._running: R | None = None
        self._client: EngineClient | None = None
        self._kept_loaded: tuple[str, ...] = ()
        self._failure: tuple[PersonaeError, float] | None = None
        self._phase: Literal["asleep", "waiting", "starting"] = "asleep"
        memory.engines.append(self)  # type: ignore[arg-type]  # it only asks what every kind answers

    @property
    def state(self) -> EngineState:
        """What it is doing."""
        if self._running is not None:
            return "running"
        return "failed" if self._phase == "asleep" and self._failure is not None else self._phase

    @property
    def running(self) -> R | None:
        """The engine that runs now."""
        return self._running

    @property
    def may_retire(self) -> bool:
        """Whether it runs, and nobody has waited for it in vain."""
        return self._running is not None and not self.retiring and not self._waiting

    def retire(self) -> None:
        """Stop as soon as the running requests have ended. Requests that come later wait for the next
        start."""
        self.retiring = True
        self._memory.notify()

    async def run(self) -> None:
        """Start and stop the engine as it is needed, until cancelled."""
        while True:
            while not self._waiting:
                await self._memory.changed()
            self._phase = "waiting"
            try:
                async with self._memory.room(self):
                    self._phase = "starting"
                    await self._once()
            except Exception as error:
                self._fail(error)
            finally:
                self._running, self.retiring, self._phase = None, False, "asleep"
                self._memory.notify()
            while self._failure is not None and self._waiting:  # for this start; later ones are refused
                await self._memory.changed()

    async def _once(self) -> None:
        """One start, until the engine is no longer needed or has failed for good."""
        _log.info("%s starts", self.name)
        async with self._open() as running:
            self._running, self._client, self._failure = running, running.client, None
            self.starts += 1
            if self._kept_loaded:
                running.client.keep_loaded(self._kept_loaded)
            self.last_used = anyio.current_time()
            self._memory.notify()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, running)
                while not self._unneeded():
                    idle = self.users == 0 and not self._waiting
                    with anyio.move_on_at(self.last_used + self._keep_alive if idle else math.inf):
                        await self._memory.changed()
                tasks.cancel_scope.cancel()
            self._running = None
            _log.info("%s stops", self.name)

    def _unneeded(self) -> bool:
        if self.users:
            return False
        idle = anyio.current_time() - self.last_used
        return self.retiring or (not self._waiting and idle >= self._keep_alive)

    async def _watch(self, running: R) -> None:
        await running.lost()
        self.retire()

    def _fail(self, error: Exception) -> None:
        why = error.message if isinstance(error, PersonaeError) else f"{type(error).__name__}: {error}"
        _log.error("%s cannot start: %s", self.name, why)
        refusal = Overloaded(f"The model `{self.name}` cannot start: {why}", code="model_not_started")
        refusal.__cause__ = error
        self._failure = (refusal, anyio.current_time())
        self._failures += 1

    @asynccontextmanager
    async def using(self) -> AsyncIterator[R]:
        """The running engine, which does not stop while the block runs. Waits until it has started, at most
        `START_SECONDS`. Raises Overloaded if it cannot start, or too many wait."""
        running = self._running
        if running is None or self.retiring:
            running = await self._started()
        self.users += 1
        try:
            yield running
        finally:
            self.users -= 1
            self.last_used = anyio.current_time()
            self._memory.notify()

    async def _started(self) -> R:
        if self._failure is not None and self._phase == "asleep":
            refusal, when = self._failure
            if self._waiting or anyio.current_time() - when < RETRY_SECONDS:
                raise refusal
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests wait for the model `{self.name}` to start.")
        self._waiting += 1
        self._memory.notify()
        failures = self._failures
        try:
            with anyio.fail_after(START_SECONDS):
                while self._running is None or self.retiring:
                    if self._failure is not None and self._failures > failures:
                        raise self._failure[0]
                    await self._memory.changed()
                return self._running
        except TimeoutError:
            raise Overloaded(
                f"The model `{self.name}` did not start within {START_SECONDS:g} seconds; other models have "
                "the memory.",
                code="model_not_started",
            ) from None
        finally:
            self._waiting -= 1
            self._memory.notify()

    @property
    def client(self) -> EngineClient:
        """The client of the last start."""
        assert self._client is not None, "it has been started once"
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
        return self.client.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have, prompt and answer together."""
        return self.client.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self.client.vocab_size

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, with the base first."""
        return self.client.models(tenant)

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""
        return self.client.salt(tenant)

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator[SequenceStream]:
        """Submit sequences, after the engine has started. Raises Overloaded."""
        async with self.using() as running, running.client.stream(logs) as stream:
            yield stream

    def stats(self) -> EngineStats:
        """Return what the engine is doing now. An engine that does not run can serve as soon as a request
        wants it, unless its last start failed."""
        if self._running is not None:
            return self._running.client.stats()
        return EngineStats(ready=self.state != "failed")

    def keep_session(self, tenant: str, session: str, seconds: float) -> None:
        """Keep the pages of a session; they are gone when the engine stops."""
        if self._running is not None:
            self._running.client.keep_session(tenant, session, seconds)

    def keep_loaded(self, adapters: Sequence[str]) -> None:
        """Keep these adapters loaded, now and after each start."""
        self._kept_loaded = tuple(adapters)
        if self._running is not None:
            self._running.client.keep_loaded(self._kept_loaded)

    def forget_session(self, tenant: str, session: str) -> None:
        """Delete the pages of a session; those in memory are gone when the engine stops, and of an engine
        that does not run those in the tier stay until it needs their room."""
        if self._running is not None:
            self._running.client.forget_session(tenant, session)
