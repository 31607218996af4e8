"""`/v1/responses`."""

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from personae.api import targets
from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.generation import unless_disconnected
from personae.api.http.operation import events, operation
from personae.api.respond import json_response
from personae.api.responses.admission import admit, count_input
from personae.api.responses.answers import Event, InputTokens, Response, ResponseDeleted
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.kept_items import KeptItem
from personae.api.responses.mcp_tools import uses_servers
from personae.api.responses.pages import ItemList, ListItems, item_list, page_of
from personae.api.responses.request import InputTokensRequest, ResponsesRequest
from personae.api.responses.store import ResponseStore
from personae.api.stream import EventStream, respond
from personae.api.wire.schema import refuse_unserved
from personae.errors import NotFound, UnsupportedParameter


@operation(
    "POST",
    "/v1/responses",
    body=ResponsesRequest,
    answers={200: (Response, events(Event))},
    headers=(targets.TIMEOUT, *targets.HEADERS),
    refuses=(403, 404, 424, 504),
)
async def create_response(request: Request) -> HttpResponse | EventStream:
    """Answer a conversation, at once or as a stream, in OpenAI's newer form."""
    exchange = exchange_of(request)
    body = await read_json(request, ResponsesRequest, exchange)
    if body.background:
        return await _begun(request, exchange, body)
    if uses_servers(body):  # they take time to answer
        job, form = await unless_disconnected(request.receive, lambda: admit(exchange, body))
    else:
        job, form = await admit(exchange, body)
    return await respond(request, job, form, stream=bool(body.stream))


@operation(
    "POST",
    "/v1/responses/input_tokens",
    body=InputTokensRequest,
    answers={200: InputTokens},
    refuses=(403, 404, 424),
)
async def count_input_tokens(request: Request) -> HttpResponse:
    """Count the tokens of the prompt that a response would have; nothing is generated."""
    exchange = exchange_of(request)
    body = await read_json(request, InputTokensRequest, exchange)
    if uses_servers(body):  # they take time to answer
        count = await unless_disconnected(request.receive, lambda: count_input(exchange, body))
    else:
        count = await count_input(exchange, body)
    return json_response(InputTokens(count))


async def _begun(request: Request, exchange: Exchange, body: ResponsesRequest) -> HttpResponse:
    """The answer to a request whose response is made in the background."""
    exchange.caller.ready()  # its turn is another's: the response has a caller of its own
    background = _background(request)
    if background is None:
        refuse_unserved(body)
        raise UnsupportedParameter("`background`: this server stores no responses.", param="background")
    return HttpResponse(await background.begin(exchange, body), media_type="application/json")


@operation("GET", "/v1/responses/{id}", answers={200: Response}, refuses=(404,))
async def get_response(request: Request) -> HttpResponse:
    """Show a stored response."""
    exchange, id = exchange_of(request), request.path_params["id"]
    if request.query_params.get("stream", "false") != "false":
        raise UnsupportedParameter("`stream`: a stored response is not streamed again.", param="stream")
    kept = await to_thread.run_sync(_store(exchange).find, exchange.caller.tenant, id)
    return HttpResponse(kept.response, media_type="application/json")


@operation("DELETE", "/v1/responses/{id}", answers={200: ResponseDeleted}, refuses=(404,))
async def delete_response(request: Request) -> HttpResponse:
    """Delete a response. Responses that follow it can no longer be continued."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _store(exchange)
    await to_thread.run_sync(store.find, exchange.caller.tenant, id)
    background = _background(request)
    if background is not None:
        background.drop(id)
    await to_thread.run_sync(store.remove, exchange.caller.tenant, id)
    return json_response(ResponseDeleted(id))


@operation("POST", "/v1/responses/{id}/cancel", answers={200: Response}, refuses=(404, 409))
async def cancel_response(request: Request) -> HttpResponse:
    """Stop a response in the background. One that has ended stays as it is."""
    exchange, id = exchange_of(request), request.path_params["id"]
    _store(exchange)  # a server without one says so
    background = _background(request)
    if background is None:
        raise NotFound(f"There is no response `{id[:80]}`.", param="id", code="response_not_found")
    return HttpResponse(await background.cancel(exchange.caller.tenant, id), media_type="application/json")


@operation("GET", "/v1/responses/{id}/input_items", query=ListItems, answers={200: ItemList}, refuses=(404,))
async def list_input_items(request: Request) -> HttpResponse:
    """List the items that the response's own request had, a page at a time."""
    exchange, id = exchange_of(request), request.path_params["id"]
    after, limit, order = page_of(request)
    kept = await to_thread.run_sync(_store(exchange).find, exchange.caller.tenant, id)
    items = msgspec.json.decode(kept.input, type=list[KeptItem])
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise NotFound(f"The response has no item `{after[:80]}`.", param="after")
        items = items[places[0] + 1 :]
    return json_response(item_list(items[:limit], len(items) > limit))


def _background(request: Request) -> BackgroundResponses | None:
    """What runs the app's responses in the background, while it does."""
    found: BackgroundResponses | None = request.app.state.background
    return found


def _store(exchange: Exchange) -> ResponseStore:
    if exchange.services.responses is None:
        raise NotFound("This server stores no responses.", code="no_responses")
    return exchange.services.responses
