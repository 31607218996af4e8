"""Server-sent events: parts are sent as they arrive, and a slow reader gets fewer, larger ones.

Two tasks share an outbox that holds at most one part per choice. One follows the engine and never waits for
the client. The other encodes what has gathered, and waits until the connection takes it. So a slow client
costs memory only for its own text, stop strings are found at once, and no other request waits.

As long as the connection takes everything at once, the first task sends each part itself, and the other one
need not wake for each token.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar, Protocol

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from personae.actors.kit.bridge import Loop
from personae.actors.kit.signal import Signal
from personae.api.choices import Part
from personae.api.exchange import Exchange
from personae.api.generation import Sink, unless_disconnected
from personae.api.http.flow import FLOW, Flow
from personae.api.packing import Pack, as_json, as_list
from personae.api.respond import encode_json
from personae.api.telemetry import logs
from personae.api.wire.errors import error_answer, visible
from personae.errors import Cancelled, PersonaeError, StorageFailed

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PING = b": ping\n\n"
_FEW_PLACES = 128  # tokens whose log-probabilities are encoded on the event loop: 3 ms with 20 for each
_encode = msgspec.json.Encoder().encode

TEXT = "\0"
"""Stands for any text in an event."""


class Work(Protocol):
    """What an answer's parts come from."""

    async def __call__(self, sink: Sink, admitted: Callable[[], None], /) -> None:
        """Put every part into `sink`, and call `admitted` once nothing can refuse the request any more."""


class AnswerJob(Protocol):
    """What runs a request to its end: a `Job`, or several in turn."""

    @property
    def exchange(self) -> Exchange:
        """The request's exchange."""

    async def run(self, sink: Sink, admitted: Callable[[], None], /) -> None:
        """As `Work`."""

    async def gather(self, receive: Receive, /) -> list[Part]:
        """Run to the end and return each complete choice, by index."""


class AnswerBuilder(Protocol):
    """How a route's answers are written, complete or divided into events. If an event is a tagged struct, its
    tag is the event's name."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def whole(self, parts: list[Part], pack: Pack = as_list) -> msgspec.Struct:
        """The complete answer with all its choices; `pack` keeps its long lists."""

    def of(self, part: Part) -> Iterable[msgspec.Struct]:
        """The events for a part; none if it contains nothing that the client would see."""

    async def store(self) -> None:
        """Store the answer, which is complete, if it is to be stored: the client may rely on it once it has
        the end of the answer. Raises StorageFailed."""
        return

    async def store_broken_off(self, error: PersonaeError) -> None:
        """Store what there is of an answer that ends with an error, if its client can fetch that. Raises
        StorageFailed."""
        return

    def event_of_text(self, index: int) -> msgspec.Struct | None:
        """The event for a later part of this choice that is only `TEXT`. None if such events differ in more
        than the text, so that `of` has to make each."""
        return None

    def last(self) -> Iterable[msgspec.Struct]:
        """The events after all choices have ended; `done` comes after them."""

    def failed(self, error: PersonaeError) -> Iterable[msgspec.Struct]:
        """The events that end a stream after an error."""
        return (error_answer(error),)


class EventStream:
    """An answer that runs `work` and sends what it puts into its sink; a response in Starlette's sense.

    The status line is sent when the request is admitted. A request that is refused before (the engine is
    full, its grammar does not compile) still gets its own status. A later error is sent as an event and ends
    the stream. After `ping` seconds of silence a comment is sent, so that proxies keep the connection, also
    if the request is not admitted by then; 0 sends none.
    """

    background = None

    def __init__(self, request: Request, work: "Work", form: AnswerBuilder, ping: float = 0.0) -> None:
        self._request_id: str = request.state.request_id
        self._work = work
        self._form = form
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        flow: Flow | None = scope.get("extensions", {}).get(FLOW)
        try:
            await unless_disconnected(receive, lambda: self._serve(send, flow))
        except Cancelled as left:  # the client has left
            logs.note(code=left.code)

    async def _serve(self, send: Send, flow: Flow | None) -> None:
        outbox = _Outbox()
        encode = _Encoder(self._form).encode
        failure: Exception | None = None
        started = False
        now = Loop.current().time
        sent_at = now()

        async def write(body: bytes, *, more: bool) -> None:
            if flow is not None:
                flow.flush()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        def put(part: Part) -> None:
            nonlocal sent_at
            if not started or flow is None or flow.write_paused or not outbox.idle:
                outbox.put(part)
            elif events := encode(part):
                sent_at = now()
                flow.write(events)

        async def follow() -> None:
            nonlocal failure
            try:
                await self._work(put, outbox.begin)
            except Exception as error:
                failure = error
            outbox.close()

        async def waiting() -> list[Part] | None:
            """The next parts; none if a comment is due, None at the end."""
            if not self._ping:
                return await outbox.take()
            with anyio.move_on_at(sent_at + self._ping):
                return await outbox.take()
            return []

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            while (parts := await waiting()) is not None:
                events = b"".join(map(encode, parts))
                if not events and self._ping and now() >= sent_at + self._ping:
                    events = _PING
                if not started and (events or outbox.begun):
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                if events:
                    await write(events, more=True)
                    sent_at = now()
        if failure is None:
            try:
                await self._form.store()
            except StorageFailed as refused:
                failure = refused
        if failure is not None and not started:
            raise failure
        if failure is not None:
            error = visible(failure, self._request_id)
            logs.note(code=error.code)
            with suppress(StorageFailed):  # the error says no more than that it is stored if it is
                await self._form.store_broken_off(error)
            last_events = self._form.failed(error)
            await write(b"".join(map(_event, last_events)), more=False)
            return
        await write(b"".join(map(_event, self._form.last())) + self._form.done, more=False)


class _Encoder:
    """Encodes the parts of an answer as events. Most parts are only text, and what is around the text is the
    same in all their events, so it is encoded once."""

    __slots__ = ("_form", "_frames")

    def __init__(self, form: AnswerBuilder) -> None:
        self._form = form
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}  # by choice, once it has begun

    def encode(self, part: Part) -> bytes:
        """The events for a part."""
        frame = self._frames.get(part.index)
        if frame is not None and (text := part.only_text):
            return frame[0] + _encode(text) + frame[1]
        events = b"".join(map(_event, self._form.of(part)))
        if part.index not in self._frames:
            self._frames[part.index] = self._frame(part.index)
        return events

    def _frame(self, index: int) -> tuple[bytes, bytes] | None:
        event = self._form.event_of_text(index)
        if event is None:
            return None
        before, _, after = _event(event).partition(_encode(TEXT))
        return before, after


def _event(value: msgspec.Struct) -> bytes:
    tag = value.__struct_config__.tag
    name = b"" if tag is None else b"event: %s\n" % str(tag).encode()
    return name + b"data: " + _encode(value) + b"\n\n"


async def respond(
    request: Request, job: AnswerJob, form: AnswerBuilder, *, stream: bool
) -> Response | EventStream:
    """The answer of a job that is ready to run, complete or as a stream. Raises what `Job.gather` does."""
    job.exchange.caller.ready()
    if stream:
        return EventStream(request, job.run, form, job.exchange.settings.stream_ping_interval)
    answer = await encoded(job.exchange, form, await job.gather(request.receive))
    return Response(answer, media_type="application/json")


async def encoded(exchange: Exchange, form: AnswerBuilder, parts: list[Part]) -> bytes:
    """The complete answer as JSON, encoded off the event loop if it has many log-probabilities. It is stored
    by then, if it is to be. Raises StorageFailed."""
    if sum(len(part.entries) + len(part.prompt_logprobs) for part in parts) <= _FEW_PLACES:
        answer = encode_json(form.whole(parts))
    else:
        answer = await exchange.off_loop(lambda: encode_json(form.whole(parts, as_json)))
    await form.store()
    return answer


class _Outbox:
    """Parts on their way to the client, merged by choice."""

    __slots__ = ("_announced", "_changed", "_closed", "_parts", "begun", "idle")

    def __init__(self) -> None:
        self.idle = False  # its reader has sent all of it
        self.begun = False
        self._announced = False
        self._parts: dict[int, Part] = {}
        self._closed = False
        self._changed = Signal()

    def begin(self) -> None:
        """The request is admitted."""
        self.begun = True
        self._changed.set()

    def put(self, part: Part) -> None:
        self.idle = False
        waiting = self._parts.get(part.index)
        if waiting is None:
            self._parts[part.index] = part
        else:
            waiting.add(part)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def take(self) -> list[Part] | None:
        """All waiting parts, as soon as there are any; none if the request was admitted before its first
        part, None at the end."""
        while not self._parts:
            if self._closed:
                return None
            if self.begun and not self._announced:
                break
            self.idle = True
            await self._changed.wait()
        self.idle = False
        self._announced = self.begun
        parts, self._parts = list(self._parts.values()), {}
        return parts
