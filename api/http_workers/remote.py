"""What the routes need, in a worker: each part asks the main process for what only that one has."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
from anyio import from_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from personae.actors.client import EngineStats, ModelCard
from personae.actors.frontend.frontend import LocalStream
from personae.actors.frontend.inbox import Inbox
from personae.actors.messages import Message
from personae.api.context import RequestContext
from personae.api.http_workers import messages as wire
from personae.api.http_workers.line import Line
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.conversations import ConversationStore
from personae.api.responses.kept_items import KeptItem
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.store import AddedItems, KeptResponse, ResponseStore
from personae.api.telemetry import logs
from personae.api.tenants.access import Caller
from personae.api.tenants.bodies import BodyBudget, Hold
from personae.api.tenants.limits import Meter, Reservation
from personae.api.tenants.store import Identity
from personae.api.tenants.usage import UsageLedger
from personae.api.wire.decode import LONG
from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import PersonaeError


class RemoteRequest:
    """A request that this worker serves: its number, by which the main process knows it, and what that one
    said when it began."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.number = line.next_number()
        self.stats = EngineStats()

    async def ask(self, kind: Any, message: Callable[..., Message], *values: Any) -> Any:
        """Make a call about this request, and return its result of that kind."""
        return await self.line.ask(lambda call: message(call, self.number, *values), kind)

    def ask_from_thread(self, kind: Any, message: Callable[..., Message], *values: Any) -> Any:
        """The same in a thread that the event loop has started."""
        return from_thread.run(self.ask, kind, message, *values)

    def tell(self, message: Callable[..., Message], *values: Any) -> None:
        """Send a message about this request."""
        self.line.tell(message(self.number, *values))

    def new_number(self) -> int:
        """A number for something that this request holds."""
        return self.line.next_number()


_current: ContextVar[RemoteRequest] = ContextVar("request")


class RemoteAccess:
    """Pure ASGI middleware in the place of `Access`: the main process finds the caller and counts the
    request."""

    def __init__(self, app: ASGIApp, *, line: Callable[[], Line]) -> None:
        self._app = app
        self._line = line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a known caller, within its limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RemoteRequest(self._line())
        try:
            headers = tuple((name, value) for name, value in scope["headers"])
            entered = await request.ask(wire.Entered, wire.Enter, headers)
            request.stats = entered.stats or request.stats
            caller = Caller(entered.identity)
            scope.setdefault("state", {})["caller"] = caller
            logs.note(tenant=caller.tenant)
            _current.set(request)
            with caller.until_done:
                await self._app(scope, receive, send)
        finally:
            request.tell(wire.Leave)


class RemoteClient:
    """`EngineClient` over the line."""

    def __init__(
        self,
        line: Callable[[], Line],
        tokenizer: Tokenizer,
        models: Mapping[str, ModelCard],
        max_model_len: int,
        vocab_size: int,
        salt: Callable[[str], bytes],
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.salt = salt
        self._models = models
        self._line = line
        self._inboxes: dict[str, Inbox] = {}

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, with the base first."""
        return self._models

    def stats(self) -> EngineStats:
        """The engine's load when the current request began, if the request asked for it."""
        request = _current.get(None)
        return EngineStats() if request is None else request.stats

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator[LocalStream]:
        """Submit the sequences. Leaving the context withdraws the unfinished ones."""
        inbox, ids = Inbox(), [log.id for log in logs]
        stream = LocalStream(inbox, set(ids), self._line())
        self._inboxes.update(dict.fromkeys(ids, inbox))
        try:  # the call too: if it is cancelled, the sequences may have been admitted
            await _current.get().ask(None, wire.Open, tuple(logs))
            yield stream
        finally:
            stream.withdraw()
            for id in ids:
                self._inboxes.pop(id, None)

    def deliver(self, deltas: wire.Deltas) -> None:
        """Hand out what a step did."""
        for delta in deltas.deltas:
            if (inbox := self._inboxes.get(delta.id)) is not None:
                inbox.put(delta)

    def fail(self, ids: Sequence[str], error: PersonaeError) -> None:
        """End a submission with an error."""
        for inbox in {id: self._inboxes[id] for id in ids if id in self._inboxes}.values():
            inbox.fail(error)

    def end_all(self, error: PersonaeError) -> None:
        """End every stream with this error."""
        self.fail(tuple(self._inboxes), error)


async def find_model(name: str, param: str) -> ModelCard:
    """The adapter of that name, which the main process holds until the request has ended. Raises NotFound."""
    card: ModelCard = await _current.get().ask(ModelCard, wire.Find, name, param)
    return card


class RemoteMeter(Meter):
    """Counts nothing here: the main process counts a request when it begins, and its prompts and schemas when
    they are submitted."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def tokens(self, who: Identity, prompt: int, answer: int, *, spare: bool = False) -> Reservation:
        """`Open` takes the tokens."""
        return _RemoteReservation(_current.get())

    def schema(self, who: Identity, source: str) -> None:
        """`Open` counts the schema."""


class _RemoteReservation(Reservation):
    def __init__(self, request: RemoteRequest) -> None:
        self._request = request

    def settle(self, used: int) -> None:
        """Have the main process give back all but the tokens that were used."""
        self._request.tell(wire.Answered, used)


class RemoteBodies(BodyBudget):
    """Bodies that are not long are not counted: there are only so many requests. The others ask for their
    room."""

    def hold(self, who: Identity) -> Hold:
        """A hold of nothing yet."""
        return _RemoteHold(self, who, _current.get())


class _RemoteHold(Hold):
    def __init__(self, budget: BodyBudget, who: Identity, request: RemoteRequest) -> None:
        super().__init__(budget, who)
        self._request = request
        self._number: int | None = None

    async def take(self, size: int) -> None:
        """Hold at least so much in all. Raises RateLimited or Overloaded."""
        if size <= max(self._size, LONG):
            return
        if self._number is None:
            self._number = self._request.new_number()
        await self._request.ask(None, wire.HoldBytes, self._number, size)
        self._size = size

    def shrink(self, size: int = 0) -> None:
        """Hold nothing any more."""
        if self._number is not None:
            self._request.tell(wire.ReleaseBytes, self._number)
            self._number, self._size = None, 0


class RemoteUsage(UsageLedger):
    """Has the main process record usage."""

    def __init__(self) -> None:
        """There is no data directory here."""

    def add(
        self,
        who: Identity,
        adapter: str | None,
        prompt: int,
        cached: int,
        completion: int,
        seconds: float = 0.0,
    ) -> None:
        """Count a request that has ended."""
        _current.get().tell(wire.Used, adapter, prompt, cached, completion, seconds)


class RemoteResponses(ResponseStore):
    """The stored responses of the main process. What blocks is called in threads, as in `ResponseStore`."""

    def __init__(self) -> None:
        """There is no data directory here."""
        self.conversations = _RemoteConversations()
        self.background = _RemoteBackground(self)

    async def put(self, one: KeptResponse | None, limit: int | None, added: AddedItems | None = None) -> None:
        """Store a response. Raises StorageFailed."""
        await _current.get().ask(None, wire.PutResponse, one, limit, added)

    def find(self, tenant: str, id: str) -> KeptResponse:
        """The tenant's response. Raises NotFound."""
        found: KeptResponse = _current.get().ask_from_thread(KeptResponse, wire.FindResponse, id)
        return found


class _RemoteConversations(ConversationStore):
    def __init__(self) -> None:
        """There is no data directory here."""

    def check_room(self, tenant: str, limit: int | None) -> None:
        """Raises QuotaExceeded if the tenant may add nothing more."""
        _current.get().ask_from_thread(None, wire.ConversationRoom, limit)

    def page(
        self, tenant: str, id: str, after: str | None, limit: int, order: str
    ) -> tuple[list[KeptItem], bool]:
        """Some of the items, and whether there are more. Raises NotFound."""
        asked = (id, after, limit, order)
        found: tuple[list[KeptItem], bool] = _current.get().ask_from_thread(
            tuple[list[dict[str, Any]], bool], wire.ConversationPage, *asked
        )
        return found


class _RemoteBackground(BackgroundResponses):
    async def begin(self, context: RequestContext, body: ResponsesRequest) -> bytes:
        """Have the main process admit a request and make its response."""
        asked = (msgspec.json.encode(body), context.targets, context.session)
        begun: wire.Begun = await _current.get().ask(wire.Begun, wire.BeginBackground, *asked)
        context.ignored.extend(begun.ignored)
        return begun.response
