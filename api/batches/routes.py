"""`/v1/batches`, as in OpenAI's API."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from personae.api.batches.model import Batch, CreateBatch
from personae.api.body import read_json
from personae.api.exchange import exchange_of
from personae.api.files.routes import batches_of, ends, page_size
from personae.api.http.operation import operation
from personae.api.respond import json_response


class BatchList(msgspec.Struct):
    """A page of batches."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class ListBatches(msgspec.Struct):
    """The query of `GET /v1/batches`."""

    after: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


@operation("POST", "/v1/batches", body=CreateBatch, answers={200: Batch}, refuses=(404,))
async def create_batch(request: Request) -> Response:
    """Run the requests of a file that was uploaded."""
    exchange = exchange_of(request)
    body = await read_json(request, CreateBatch, exchange)
    return json_response(await batches_of(request).create(exchange.caller.identity, body, exchange.settings))


@operation("GET", "/v1/batches", query=ListBatches, answers={200: BatchList}, refuses=(404,))
async def list_batches(request: Request) -> Response:
    """List the tenant's batches, a page at a time, the newest first."""
    exchange = exchange_of(request)
    after, limit = request.query_params.get("after"), page_size(request, 20, 100)
    data, more = batches_of(request).page(exchange.caller.tenant, after, limit)
    return json_response(BatchList(data, more, *ends(data)))


@operation("GET", "/v1/batches/{id}", answers={200: Batch}, refuses=(404,))
async def get_batch(request: Request) -> Response:
    """Show a batch."""
    exchange = exchange_of(request)
    return json_response(batches_of(request).get(exchange.caller.tenant, request.path_params["id"]))


@operation("POST", "/v1/batches/{id}/cancel", answers={200: Batch}, refuses=(404, 409))
async def cancel_batch(request: Request) -> Response:
    """Stop a batch. It keeps the results so far."""
    exchange = exchange_of(request)
    return json_response(await batches_of(request).cancel(exchange.caller.tenant, request.path_params["id"]))
