"""Responses in the background: their clients leave, and fetch them later.

    queued -> in_progress -> completed, incomplete or failed
                          -> cancelled

When a server stops, it keeps the requests of those that it did not finish. They begin again when it starts
with the same data directory.
"""

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import anyio
import msgspec
from anyio import CancelScope, to_thread
from anyio.abc import TaskGroup
from starlette.applications import Starlette

from personae.actors.kit.background import background_tasks
from personae.api.database.leases import LOOK_SECONDS
from personae.api.exchange import Exchange
from personae.api.responses.admission import Keeping, admit_kept
from personae.api.responses.answers import Response, ResponseError
from personae.api.responses.builder import ResponseBuilder
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.store import KeptResponse, ResponseStore
from personae.api.services import Services
from personae.api.stream import AnswerJob
from personae.api.telemetry import logs
from personae.api.tenants.access import LOCAL_ADMIN, Caller
from personae.api.tenants.store import Identity
from personae.api.wire.decode import LONG, decode
from personae.api.wire.errors import visible
from personae.errors import (
    Conflict,
    NotFound,
    Overloaded,
    PersonaeError,
    QuotaExceeded,
    RateLimited,
    RequestError,
    StorageFailed,
    Unauthorized,
)

logger = logging.getLogger(__name__)

MOST_LIVE = 64
"""Responses of a tenant that are not answered yet."""
_LEAST_WAIT = 1.0  # seconds until a response is tried again
_AFTER_AN_ERROR = 30.0  # the same, after an error of ours
_ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is ready to run, and who asks."""

    caller: Caller
    job: AnswerJob
    form: ResponseBuilder
    keeping: Keeping


@dataclass(slots=True)
class _Live:
    """A response that is not answered yet."""

    tenant: str
    scope: CancelScope


class BackgroundResponses:
    """Runs the responses of a store that nobody waits for, within `runs`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._live: dict[str, _Live] = {}
        self._counts: Counter[str] = Counter()
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def runs(self, app: Starlette) -> AsyncIterator[None]:
        """Run the new responses of an app, and the ones that an earlier server left, while the block runs."""
        self._services: Services = app.state.services
        async with background_tasks() as tasks:
            self._tasks, self._store.check_background = tasks, self.check_room
            app.state.background = self
            await self._take_over()
            if self._store.shared:
                tasks.start_soon(self._look)
            try:
                yield
            finally:
                self._tasks = self._store.check_background = app.state.background = None

    async def _take_over(self) -> None:
        """Run what no server works on."""
        for tenant, id in await to_thread.run_sync(self._store.unanswered):
            if id not in self._live:
                self._begin(tenant, id, None)

    async def _look(self) -> None:
        """Notice what other servers leave, cancel or delete."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            try:
                for id in await to_thread.run_sync(self._store.ended_by_others, list(self._live)):
                    self.drop(id)
                await self._take_over()
            except StorageFailed as error:
                logger.warning("other servers' responses are not known: %s", error.message)
            except Exception as error:  # a task that ends would take the server with it
                logger.error("other servers' responses are not known", exc_info=error)

    def check_room(self, tenant: str) -> None:
        """Raises QuotaExceeded for a tenant with too many of them."""
        if self._counts[tenant] >= MOST_LIVE:
            raise QuotaExceeded(
                f"This tenant has {MOST_LIVE} responses in the background; wait for one to end.",
                param="background",
            )

    async def begin(self, exchange: Exchange, body: ResponsesRequest) -> bytes:
        """Admit a request and start its response; returns it as it is then, as JSON. Raises what `admit`
        raises."""
        whole = msgspec.json.encode(body)
        admitted = await admit_background(exchange, exchange.caller.identity, body)
        return msgspec.json.encode(await self.start(admitted, whole))

    async def start(self, admitted: Admitted, request: bytes) -> Response:
        """Take a response, whose whole request is `request`. Raises QuotaExceeded, or StorageFailed."""
        response, tenant = admitted.form.begun(), admitted.keeping.tenant
        response.status = "queued"
        begun = False
        try:
            self.check_room(tenant)
            self._counts[tenant] += 1  # also while it is being stored
            try:
                await admitted.keeping.begin(response, request)
            finally:
                self._counts[tenant] -= 1
            if self._tasks is not None:  # else the next start runs it
                self._begin(tenant, response.id, admitted)
                begun = True
        finally:
            if not begun:
                admitted.caller.until_done.close()
        return response

    async def cancel(self, tenant: str, id: str) -> bytes:
        """End a response; returns it as it is then, as JSON. Raises NotFound, or Conflict if it is not in the
        background."""
        kept, found = await self._found(tenant, id)
        if not found.background:
            raise Conflict("Only a response with `background` can be cancelled.", param="id")
        if found.status in _ENDED:
            return kept.response
        self.drop(id)
        found.status = "cancelled"
        ended = replace(kept, response=msgspec.json.encode(found), request=None)
        return (await to_thread.run_sync(self._store.end, ended)).response

    def drop(self, id: str) -> None:
        """End a response."""
        if (live := self._live.get(id)) is not None:
            live.scope.cancel()

    def _begin(self, tenant: str, id: str, admitted: Admitted | None) -> None:
        assert self._tasks is not None
        self._live[id] = live = _Live(tenant, CancelScope())
        self._counts[tenant] += 1
        self._tasks.start_soon(self._play, id, live, admitted)

    async def _play(self, id: str, live: _Live, admitted: Admitted | None) -> None:
        """Run one to its end, and again while there is no room for it."""
        try:
            with logs.request(id), live.scope:
                logs.note(tenant=live.tenant)
                while (retry := await self._attempt(id, live, admitted)) is not None:
                    admitted = None
                    await anyio.sleep(max(retry, _LEAST_WAIT))
        finally:
            if admitted is not None:
                admitted.caller.until_done.close()
            del self._live[id]
            self._counts[live.tenant] -= 1

    async def _attempt(self, id: str, live: _Live, admitted: Admitted | None) -> float | None:
        """Run it once; seconds until it is to be tried again, None once it has ended."""
        try:
            try:
                await self._run(id, live, admitted or await self._again(live.tenant, id))
            except (RateLimited, Overloaded) as busy:
                if not isinstance(busy, QuotaExceeded):
                    return busy.retry_after or _LEAST_WAIT
                await self._fail(live, id, busy)
            except Exception as error:
                await self._fail(live, id, visible(error, id))
        except StorageFailed as error:  # nobody waits for it but this task
            return error.retry_after or _LEAST_WAIT
        except Exception as error:  # a task that ends so would take the server with it
            logger.error("background response %s is tried again", id, exc_info=error)
            return _AFTER_AN_ERROR
        return None

    async def _run(self, id: str, live: _Live, admitted: Admitted) -> None:
        with admitted.caller.until_done:
            kept, _ = await self._found(live.tenant, id)
            begun = msgspec.json.encode(admitted.form.begun())
            await self._store.update(replace(kept, response=begun))
            admitted.form.whole(await admitted.job.gather(_nobody))
            await self._kept(admitted.form)
        logger.info("background response %s is complete", id)

    async def _again(self, tenant: str, id: str) -> Admitted:
        """Admit a response anew, from what is kept of it. Raises NotFound, or what admission raises."""
        kept, before = await self._found(tenant, id)
        services = self._services
        who = LOCAL_ADMIN if services.tenants is None else services.tenants.on_behalf_of(tenant)
        if who is None:
            raise Unauthorized("The tenant of this response has been revoked.")
        depth = services.settings.max_json_depth
        body = decode(kept.request or b"", ResponsesRequest, depth, unknown="ignore")
        return await admit_background(Exchange(services), who, body, id=id, created=before.created_at)

    async def _fail(self, live: _Live, id: str, error: PersonaeError) -> None:
        """Keep that it failed, unless it was deleted meanwhile."""
        logger.warning("background response %s failed: %s", id, error.message)
        with suppress(NotFound):
            kept, response = await self._found(live.tenant, id)
            response.status = "failed"
            response.error = ResponseError(_code(error), error.message)
            failed = replace(kept, response=msgspec.json.encode(response), request=None)
            await self._store.update(failed)

    async def _kept(self, form: ResponseBuilder) -> None:
        """Store an answer, again and again while the disk is full: it need not be made again."""
        while True:
            try:
                return await form.store()
            except StorageFailed as error:
                await anyio.sleep(error.retry_after or _LEAST_WAIT)

    async def _found(self, tenant: str, id: str) -> tuple[KeptResponse, Response]:
        kept = await to_thread.run_sync(self._store.find, tenant, id)
        return kept, msgspec.json.decode(kept.response, type=Response)


async def admit_background(
    exchange: Exchange,
    who: Identity,
    body: ResponsesRequest,
    *,
    id: str | None = None,
    created: int | None = None,
) -> Admitted:
    """Admit a request that lives longer than its connection. Raises what `admit` raises."""
    caller = Caller(who)
    caller.body_size = LONG + 1  # nobody waits: it is prepared off the event loop
    headers = replace(exchange.headers, arrived=None, patience=math.inf)
    own = replace(exchange, caller=caller, headers=headers, answer_headers={})
    try:
        job, form, keeping = await admit_kept(own, body, id=id, created=created)
    except BaseException:
        caller.until_done.close()
        raise
    assert keeping is not None, "only what is stored may be in the background"
    caller.ready()
    return Admitted(caller, job, form, keeping)


def _code(error: PersonaeError) -> str:
    """The code of OpenAI's that says the most of an error."""
    if isinstance(error, RateLimited):
        return "rate_limit_exceeded"
    wrong = isinstance(error, RequestError) and not isinstance(error, Unauthorized)
    return "invalid_prompt" if wrong else "server_error"


async def _nobody() -> dict[str, object]:
    """There is no connection that could be closed."""
    await anyio.sleep_forever()
    raise AssertionError
