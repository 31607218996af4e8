"""`/v1/batches`, as OpenAI has it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from personae.api.batches.model import Batch, CreateBatch
from personae.api.decode import read_json
from personae.api.files.routes import batches_of, ends, page_size
from personae.api.generation import door_of
from personae.api.respond import json_response


class BatchList(msgspec.Struct):
    """A page of batches."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


async def create(request: Request) -> Response:
    """`POST /v1/batches`: run the requests of a file that was uploaded."""
    door = door_of(request)
    body = await read_json(request, CreateBatch, door.settings.max_json_depth)
    return json_response(await batches_of(door).create(door.caller.identity, body, door.settings))


async def list_batches(request: Request) -> Response:
    """`GET /v1/batches`: the tenant's own, a page at a time, the newest first."""
    door = door_of(request)
    after, limit = request.query_params.get("after"), page_size(request, 20, 100)
    data, more = batches_of(door).page(door.caller.tenant, after, limit)
    return json_response(BatchList(data, more, *ends(data)))


async def get_batch(request: Request) -> Response:
    """`GET /v1/batches/{id}`."""
    door = door_of(request)
    return json_response(batches_of(door).get(door.caller.tenant, request.path_params["id"]))


async def cancel_batch(request: Request) -> Response:
    """`POST /v1/batches/{id}/cancel`: what is done by now is kept."""
    door = door_of(request)
    return json_response(await batches_of(door).cancel(door.caller.tenant, request.path_params["id"]))
