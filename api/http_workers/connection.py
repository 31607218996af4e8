"""The main process's side of one HTTP worker: what its requests hold here, and the calls that they make.

Everything that must be one for all workers is here: keys and limits, the registry's files, the engine's
queues, stored responses, usage. When the line closes, everything that the worker's requests held is released.
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup
from starlette.datastructures import Headers
from starlette.types import ASGIApp

from personae.actors.client import EngineStats
from personae.actors.framing import encode
from personae.actors.frontend.inbox import Inbox
from personae.actors.messages import Withdraw
from personae.api.context import RequestContext
from personae.api.http_workers import messages as wire
from personae.api.http_workers.forwarded import Forwarded
from personae.api.http_workers.line import Line
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.store import ResponseStore
from personae.api.telemetry import orca
from personae.api.tenants.access import Access, Caller
from personae.api.tenants.bodies import Hold
from personae.api.tenants.limits import Reservation
from personae.api.tenants.revocations import Watched
from personae.api.wire.decode import decode
from personae.api.wire.errors import visible
from personae.engine.sequence import Delta, SequenceLog
from personae.errors import NotFound, Overloaded, PersonaeError

logger = logging.getLogger(__name__)


class Submitter(Protocol):
    """What runs sequences: `LocalClient`."""

    async def submit(self, logs: tuple[SequenceLog, ...], inbox: Inbox) -> None:
        """Submit sequences whose deltas go to `inbox`. Raises Overloaded."""

    def withdraw(self, ids: tuple[str, ...]) -> None:
        """End sequences."""


@dataclass(slots=True)
class HeldRequest:
    """What a worker's request holds in the main process. `live` are its sequences that have not ended,
    `reserved` are the tokens that they may have, `delivered` counts those sent to the worker."""

    caller: Caller
    watched: Watched | None = None
    holds: dict[int, Hold] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    reserved: list[Reservation] = field(default_factory=list)
    delivered: int = 0
    running: bool = False

    def settle(self, used: int) -> None:
        """Give back the reserved tokens that were not used."""
        for reservation in self.reserved:
            reservation.settle(used)
            used = 0
        self.reserved.clear()
        self.delivered = 0


class LineInbox(Inbox):
    """Passes the deltas of a submission on to its worker."""

    def __init__(self, connection: "Connection", request: HeldRequest, ids: tuple[str, ...]) -> None:
        super().__init__()
        self._connection = connection
        self._request = request
        self._ids = ids

    def put(self, delta: Delta) -> None:
        """Pass a delta on, with all others of the same step."""
        self._request.delivered += len(delta.tokens)
        if delta.finish is not None:
            self._request.live.discard(delta.id)
        self._connection.deliver(delta)

    def fail(self, error: Exception) -> None:
        """End the submission with an error."""
        self._request.live.difference_update(self._ids)
        self._connection.fail(self._ids, error)


class Connection:
    """One worker's requests. `app` serves the requests that the worker
    passes on. `tasks` runs the calls that have to wait."""

    def __init__(
        self,
        connection: socket.socket,
        context: RequestContext,
        client: Submitter,
        access: Access,
        app: ASGIApp,
        tasks: TaskGroup,
    ) -> None:
        self._context = context
        self._client = client
        self._access = access
        self._app = app
        self._tasks = tasks
        self._requests: dict[int, HeldRequest] = {}
        self._forwarded: dict[int, Forwarded] = {}
        self._deltas: list[Delta] = []
        self._reported = anyio.Event()
        self.serving = anyio.Event()
        self.closed = anyio.Event()
        self.line = Line(connection, wire.ToMain, self._receive, self._release)

    @property
    def held(self) -> int:
        """The number of requests that the worker has here."""
        return len(self._requests) + len(self._forwarded)

    async def report(self) -> None:
        """Wait until what the worker has counted is here."""
        self._reported = anyio.Event()
        self.line.tell(wire.Report())
        if self.line.is_open:
            await self._reported.wait()

    def deliver(self, delta: Delta) -> None:
        """Send a delta, with all others of the same turn of the event loop in one message."""
        if not self._deltas:
            self.line.call_soon(self._flush)
        self._deltas.append(delta)

    def fail(self, ids: tuple[str, ...], error: Exception) -> None:
        """End a submission with an error."""
        self._flush()
        self.line.tell(wire.StreamFailed(ids, wire.Failure.of(visible(error, ids[0]))))

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = tuple(self._deltas), []
            self.line.tell(wire.Deltas(deltas))

    def _receive(self, message: Any) -> None:
        match message:
            case Withdraw(ids=ids):
                self._client.withdraw(ids)
            case wire.Received(number=number) | wire.Taken(number=number):
                if (forwarded := self._forwarded.get(number)) is not None:
                    forwarded.take(message)
            case wire.Gone(number=number):
                if (forwarded := self._forwarded.get(number)) is not None:
                    forwarded.disconnect()
            case wire.Enter(call=call):
                self._reply(call, partial(self._enter, message))
            case wire.Leave(request=number):
                self._leave(number)
            case wire.Forward(number=number):
                self._forwarded[number] = Forwarded(message, self.line)
                self._tasks.start_soon(self._serve, number)
            case wire.Increments(increments=increments):
                self._context.metrics.merged.add(increments)
                self._reported.set()
            case wire.Serving():
                self.serving.set()
            case _:
                if (held := self._requests.get(message.request)) is not None:
                    self._receive_for(held, message)

    def _receive_for(self, held: HeldRequest, message: Any) -> None:
        """Handle a message that concerns a request."""
        who = held.caller.identity
        match message:
            case wire.Find(call=call, name=name, param=param):
                context = replace(self._context, caller=held.caller)
                self._reply(call, lambda: context.model(name, param))
            case wire.HoldBytes(call=call):
                self._reply(call, lambda: self._hold(held, message.hold, message.size))
            case wire.ReleaseBytes(hold=hold):
                if hold in held.holds:
                    held.holds.pop(hold).shrink()
            case wire.Open(call=call, logs=logs):
                self._later(call, partial(self._open, held, logs))
            case wire.Answered(tokens=tokens):
                held.settle(tokens)
            case wire.Used(adapter=adapter, prompt=prompt, cached=cached, completion=said, seconds=seconds):
                if self._context.usage is not None:
                    self._context.usage.add(who, adapter, prompt, cached, said, seconds)
            case wire.FindResponse(call=call, id=id):
                self._later(call, lambda: to_thread.run_sync(self._stored().find, who.tenant, id))
            case wire.PutResponse(call=call, response=response, limit=limit, added=added):
                self._later(call, lambda: self._stored().put(response, limit, added))
            case wire.ConversationRoom(call=call, limit=limit):
                asked = (who.tenant, limit)
                self._later(call, lambda: to_thread.run_sync(self._stored().conversations.check_room, *asked))
            case wire.ConversationPage(call=call):
                place = (who.tenant, message.id, message.after, message.limit, message.order)
                self._later(call, lambda: to_thread.run_sync(self._stored().conversations.page, *place))
            case wire.BeginBackground(call=call):
                self._later(call, partial(self._begin_background, held, message))

    def _enter(self, message: wire.Enter) -> wire.Entered:
        """Find the caller of a request, and count the request until it leaves."""
        headers = Headers(raw=list(message.headers))
        held = HeldRequest(Caller(self._access.identify(headers)))
        who = held.caller.identity
        held.caller.until_done.enter_context(self._context.meter.request(who))
        watching = self._context.revocations.watching(who, lambda: self._end(held))
        held.watched = held.caller.until_done.enter_context(watching)
        self._requests[message.request] = held
        load = self._load() if orca.FORMAT_HEADER.decode() in headers else None
        return wire.Entered(who, load)

    def _load(self) -> EngineStats:
        now = self._context.client.stats()
        return EngineStats(
            running=now.running,
            waiting=now.waiting,
            pages_total=now.pages_total,
            pages_used=now.pages_used,
        )

    def _hold(self, held: HeldRequest, number: int, size: int) -> None:
        if number not in held.holds:
            hold = self._context.bodies.hold(held.caller.identity)
            held.caller.until_done.callback(hold.shrink)
            held.holds[number] = hold
        held.holds[number].grow(size)

    async def _open(self, held: HeldRequest, logs: tuple[SequenceLog, ...]) -> None:
        if held.watched is not None and held.watched.revoked:
            raise held.watched.error()
        meter, who = self._context.meter, held.caller.identity
        leaders = [log for log in logs if log.after is None]
        for log in leaders:
            if log.grammar is not None:
                meter.schema(who, log.grammar.source)
        prompt, answer = sum(log.prompt_length for log in leaders), sum(log.params.max_tokens for log in logs)
        held.reserved.append(meter.tokens(who, prompt, answer))
        ids = tuple(log.id for log in logs)
        if not held.running:
            held.running = True
            held.caller.until_done.enter_context(self._context.metrics.counted())
        held.live.update(ids)
        try:
            await self._client.submit(logs, LineInbox(self, held, ids))
        except Overloaded:
            held.live.difference_update(ids)
            raise

    async def _begin_background(self, held: HeldRequest, message: wire.BeginBackground) -> wire.Begun:
        background = self._stored().background
        if background is None:
            raise Overloaded("The server is stopping.", code="shutting_down")
        context = replace(
            self._context,
            caller=held.caller,
            targets=message.targets,
            session=message.session,
            ignored=[],
            answer_headers={},
        )
        depth = context.settings.max_json_depth
        body = decode(message.body, ResponsesRequest, depth, unknown="ignore")
        return wire.Begun(await background.begin(context, body), context.ignored)

    def _stored(self) -> ResponseStore:
        if self._context.responses is None:
            raise NotFound("This server stores no responses.", code="no_responses")
        return self._context.responses

    def _reply(self, call: int, work: Callable[[], Any]) -> None:
        """Answer a call at once."""
        try:
            self._return(call, work())
        except Exception as error:
            self._refuse(call, error)

    def _later(self, call: int, work: Callable[[], Awaitable[Any]]) -> None:
        """Answer a call when its work is done."""

        async def run() -> None:
            try:
                self._return(call, await work())
            except Exception as error:
                self._refuse(call, error)

        self._tasks.start_soon(run)

    def _return(self, call: int, value: Any) -> None:
        self.line.tell(wire.CallResult(call, msgspec.Raw(encode(value))))

    def _refuse(self, call: int, error: Exception) -> None:
        self.line.tell(wire.CallResult(call, failure=wire.Failure.of(visible(error, f"of call {call}"))))

    async def _serve(self, number: int) -> None:
        """Serve a request that the worker passes on."""
        broken = False
        try:
            await self._forwarded[number].run(self._app)
        except Exception as error:
            broken = True
            if not isinstance(error, PersonaeError):
                logger.debug("an answer was not completed: %s", error)
        finally:
            del self._forwarded[number]
        self.line.tell(wire.AnswerEnds(number, broken))

    def _end(self, held: HeldRequest) -> None:
        """End a request whose key was revoked."""
        ids = tuple(held.live)
        held.live.clear()
        if ids and held.watched is not None:
            self._client.withdraw(ids)
            self.fail(ids, held.watched.error())

    def _leave(self, number: int) -> None:
        held = self._requests.pop(number, None)
        if held is None:
            return
        if held.live:
            self._client.withdraw(tuple(held.live))
        held.settle(held.delivered)
        held.caller.until_done.close()

    def _release(self) -> None:
        """The worker has ended: so have all of its requests."""
        for number in tuple(self._requests):
            self._leave(number)
        for forwarded in self._forwarded.values():
            forwarded.disconnect()
        self._deltas.clear()
        self._reported.set()
        self.closed.set()
