"""Reads a request's JSON body, from the connection to a checked struct."""

from functools import partial
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from personae.api.exchange import Exchange
from personae.api.generation import unless_disconnected
from personae.api.wire.decode import LONG, decode
from personae.api.wire.schema import Body
from personae.errors import Cancelled, RequestError

T = TypeVar("T", bound=Body)

_SHOWN = 100


async def read_json(request: Request, type: type[T], exchange: Exchange) -> T:
    """The request's body as `type`. Raises RequestError, and the errors of reading the body.

    A long body waits for its tenant's turn, which the request keeps until it is ready for the engine. A
    client that leaves meanwhile loses its place. Raises RateLimited or Overloaded if there is no room for the
    body.
    """
    _check_headers(request)
    body = await _receive(request, exchange)
    exchange.caller.body_size = len(body)
    settings = exchange.settings
    read = partial(
        decode, body, type, settings.max_json_depth, unknown=settings.unknown_fields, ignored=exchange.ignored
    )
    if len(body) <= LONG:
        workers, tenant = exchange.services.workers, exchange.caller.tenant
        if wait := workers.reserve_loop(tenant):
            try:
                await unless_disconnected(request.receive, partial(anyio.sleep, wait))
            except BaseException:
                workers.release_loop(tenant)
                raise
        return workers.on_loop(tenant, read)
    await unless_disconnected(request.receive, exchange.take_turn)
    return await exchange.off_loop(read)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            "The body must be JSON, sent with the header content-type: application/json.",
            param="content-type",
            code="unsupported_media_type",
        )
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise RequestError(
            f"A body in the content-encoding {coding[:_SHOWN]} is not read; send it as it is.",
            param="content-encoding",
            code="unsupported_media_type",
        )


async def _receive(request: Request, exchange: Exchange) -> bytes:
    """The body, within the room for bodies. Starlette's own `body()` would keep it as long as the request."""
    hold = exchange.services.bodies.hold(exchange.caller.identity)
    exchange.caller.until_ready.callback(hold.shrink)
    length = request.headers.get("content-length", "")
    if length.isdigit():  # the gate has checked the header
        hold.grow(int(length))
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            hold.grow(size)
            pieces.append(piece)
    except ClientDisconnect:
        raise Cancelled("The client went away before its request was complete.") from None
    return b"".join(pieces)
