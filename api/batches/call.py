"""Runs one request of a batch, and writes what it would have got over HTTP as a line of a file."""

import math
import uuid
from collections.abc import Callable
from functools import partial

import anyio
import msgspec
from starlette.types import Receive

from personae.api import chat, completions
from personae.api.batches.input import ENDPOINTS, BatchRequest
from personae.api.batches.model import BatchResponse, InputLine, OutputLine
from personae.api.batches.store import new_id
from personae.api.embeddings import vectors
from personae.api.embeddings.wire import EmbeddingRequest
from personae.api.exchange import Exchange
from personae.api.generation import Job
from personae.api.responses import admission as responses
from personae.api.responses.request import ResponsesRequest
from personae.api.services import Services
from personae.api.stream import AnswerBuilder, encoded
from personae.api.tenants.access import Caller
from personae.api.tenants.store import Identity
from personae.api.wire.decode import LONG, decode
from personae.api.wire.errors import error_answer, visible
from personae.api.wire.schema import ChatRequest, CompletionRequest
from personae.errors import Overloaded, QuotaExceeded, RateLimited, Unauthorized


class RetryLater(Exception):
    """There is no room now: try again in so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _Generation:
    """A request whose answer is text."""

    def __init__(self, job: Job, form: AnswerBuilder) -> None:
        self._job = job
        self._form = form
        job.deadline = math.inf  # the batch has one

    @property
    def sequences(self) -> int:
        """How many sequences it has in the engine."""
        return len(self._job.logs)

    async def answer(self, receive: Receive) -> bytes:
        """Raises what Job.gather raises."""
        return await encoded(self._job.exchange, self._form, await self._job.gather(receive))


class BatchCall:
    """A request of a batch. `prepare` it, then `run` it. Each raises RetryLater if there is no room for it
    now.

    If `who` is None, its tenant has been revoked. `check_room` raises if there is no room for its result.
    """

    def __init__(
        self,
        services: Services,
        who: Identity | None,
        line: InputLine,
        check_room: Callable[[Identity], None],
    ) -> None:
        self._exchange = None if who is None else Exchange(services, Caller(who), background=True)
        self._line = line
        self._check_room = check_room
        self._request_id = uuid.uuid4().hex
        self._work: _Generation | vectors.EmbeddingJob | None = None
        self.result: OutputLine | None = None

    @property
    def sequences(self) -> int:
        """How many sequences it has in the engine."""
        return self._work.sequences if self._work else 0

    async def prepare(self) -> None:
        """Check and encode. Sets `result` if that ends the request."""
        try:
            if self._exchange is None:
                raise Unauthorized("The tenant of this batch has been revoked.")
            self._check_room(self._exchange.caller.identity)
            body = await self._decoded(self._exchange)
            self._work = await self._admitted(self._exchange, body)
        except Exception as error:
            self._fail(error)
        finally:
            if self._exchange is not None:
                self._exchange.caller.ready()

    async def _admitted(self, exchange: Exchange, body: BatchRequest) -> "_Generation | vectors.EmbeddingJob":
        match body:
            case ChatRequest():
                return _Generation(*await chat.admit(exchange, body))
            case CompletionRequest():
                return _Generation(*await completions.admit(exchange, body))
            case ResponsesRequest():
                job, form = await responses.admit(exchange, body)
                assert isinstance(job, Job), "a batch uses no MCP servers"
                return _Generation(job, form)
            case EmbeddingRequest():
                return await vectors.admit(exchange, body)

    async def _decoded(self, exchange: Exchange) -> BatchRequest:
        """The body, off the event loop if it is long."""
        text = bytes(self._line.body)
        type, settings = ENDPOINTS[self._line.url], exchange.settings
        exchange.caller.body_size = len(text)
        read = partial(decode, text, type, settings.max_json_depth, unknown=settings.unknown_fields)
        if len(text) <= LONG:
            return read()
        await exchange.take_turn()
        return await exchange.off_loop(read)

    async def run(self) -> None:
        """Answer it. Sets `result`."""
        assert self._work is not None
        try:
            self._end(200, await self._work.answer(_never_disconnected))
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Release what it holds: its adapter's files."""
        if self._exchange is not None:
            self._exchange.caller.until_done.close()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RateLimited | Overloaded) and not isinstance(error, QuotaExceeded):
            raise RetryLater(error.retry_after or 1.0)
        shown = visible(error, self._request_id)
        self._end(shown.status, msgspec.json.encode(error_answer(shown)))

    def _end(self, status: int, body: bytes) -> None:
        self.result = OutputLine(
            new_id("batch_req"),
            self._line.custom_id,
            BatchResponse(status, self._request_id, msgspec.Raw(body)),
            None,
        )


async def _never_disconnected() -> dict[str, object]:
    """A batch has no connection that could close."""
    await anyio.sleep_forever()
    raise AssertionError
