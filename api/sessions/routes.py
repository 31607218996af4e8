"""`/v1/sessions`: the caller's sessions, and how long their keys and values are kept."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from personae.api.body import read_json
from personae.api.exchange import exchange_of
from personae.api.http.operation import operation
from personae.api.respond import json_response
from personae.api.sessions.store import LONGEST_TTL, Session, session_key
from personae.api.wire.schema import Body


class SessionList(msgspec.Struct):
    """The tenant's sessions, the least recently used first."""

    data: list[Session]
    object: str = "list"


class ChangeSession(Body, kw_only=True):
    """`POST /v1/sessions/{id}`. `ttl`: how many seconds from now on, and after each later request, the keys
    and values are kept; 0 releases them."""

    ttl: Annotated[int, Meta(ge=0, le=LONGEST_TTL)]


class SessionDeleted(msgspec.Struct):
    """The answer of `DELETE /v1/sessions/{id}`."""

    id: str
    object: str = "session"
    deleted: bool = True


@operation("GET", "/v1/sessions", answers={200: SessionList})
async def list_sessions(request: Request) -> Response:
    """List the sessions."""
    exchange = exchange_of(request)
    return json_response(SessionList(exchange.services.sessions.list(exchange.caller.tenant)))


@operation("GET", "/v1/sessions/{id:path}", answers={200: Session}, refuses=(404,))
async def get_session(request: Request) -> Response:
    """Show a session."""
    exchange = exchange_of(request)
    return json_response(exchange.services.sessions.find(exchange.caller.tenant, request.path_params["id"]))


@operation("POST", "/v1/sessions/{id:path}", body=ChangeSession, answers={200: Session}, refuses=(404,))
async def change_session(request: Request) -> Response:
    """Change how long the keys and values of a session are kept."""
    exchange, name = exchange_of(request), request.path_params["id"]
    body = await read_json(request, ChangeSession, exchange)
    session = exchange.services.sessions.keep(exchange.caller.tenant, name, body.ttl)
    exchange.client.keep_session(exchange.caller.tenant, session_key(name), body.ttl)
    return json_response(session)


@operation("DELETE", "/v1/sessions/{id:path}", answers={200: SessionDeleted}, refuses=(404,))
async def delete_session(request: Request) -> Response:
    """Forget a session, and delete its keys and values, in memory and on the disk. Those that other requests
    use stay."""
    exchange, name = exchange_of(request), request.path_params["id"]
    exchange.services.sessions.remove(exchange.caller.tenant, name)
    exchange.client.forget_session(exchange.caller.tenant, session_key(name))
    return json_response(SessionDeleted(name))
