"""`/v1/replicas`: the engines behind this server, and their number."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from personae.actors.replicas.scaling import DRAIN_SECONDS, ReplicaInfo, ReplicaScaler, Role, Status
from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import operation
from personae.api.respond import json_response
from personae.api.wire.schema import Body
from personae.errors import NotFound


class Replica(msgspec.Struct, frozen=True):
    """An engine. `running` sequences are being computed; `waiting` ones were sent to it and are not computed
    yet. `error` says why a failed engine failed. A `role` other than `both` says that some engines only
    compute prompts (`prefill`) while the others answer (`decode`)."""

    id: str
    status: Status
    role: Role
    running: int
    waiting: int
    restarts: int
    error: str | None
    object: str = "replica"


class ReplicaList(msgspec.Struct, frozen=True):
    """All engines. There may be at most `max_replicas`."""

    data: list[Replica]
    max_replicas: int
    object: str = "list"


class ScaleReplicas(Body, kw_only=True):
    """`POST /v1/replicas`: the requested number of engines. Removed engines get no new requests; their
    answers have `drain_timeout` seconds to end before they continue at other engines."""

    replicas: Annotated[int, Meta(ge=0)]
    drain_timeout: Annotated[float, Meta(ge=0, le=3600)] = DRAIN_SECONDS


@operation("GET", "/v1/replicas", answers={200: ReplicaList}, refuses=(404,), admin=True)
async def list_replicas(request: Request) -> Response:
    """List the engines."""
    return json_response(_listed(_scaler(exchange_of(request))))


@operation(
    "POST", "/v1/replicas", body=ScaleReplicas, answers={200: ReplicaList}, refuses=(404, 409), admin=True
)
async def scale_replicas(request: Request) -> Response:
    """Add or remove engines while the others serve. The answer does not wait: an added engine is `starting`,
    and a removed one is `draining`."""
    exchange = exchange_of(request)
    scaler = _scaler(exchange)
    body = await read_json(request, ScaleReplicas, exchange)
    await scaler.scale(body.replicas, body.drain_timeout)
    exchange.services.live.drop()
    return json_response(_listed(scaler))


def _scaler(exchange: Exchange) -> ReplicaScaler:
    if exchange.services.scaler is None:
        raise NotFound("This server has one engine. Start it with --replicas to have more.")
    return exchange.services.scaler


def _listed(scaler: ReplicaScaler) -> ReplicaList:
    return ReplicaList([_shown(info) for info in scaler.list()], scaler.most)


def _shown(info: ReplicaInfo) -> Replica:
    return Replica(
        str(info.id), info.status, info.role, info.running, info.waiting, info.restarts, info.error
    )
