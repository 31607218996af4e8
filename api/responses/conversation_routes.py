"""`/v1/conversations`, as OpenAI has it."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import operation
from personae.api.respond import json_response
from personae.api.responses.conversations import Conversation, ConversationStore
from personae.api.responses.items import Item, ItemReference
from personae.api.responses.kept_items import KeptItem, kept_items
from personae.api.responses.pages import ItemList, ListItems, item_list, page_of
from personae.api.responses.request import ItemsBody
from personae.api.wire.metadata import check_metadata
from personae.api.wire.schema import Body
from personae.errors import NotFound, RequestError, UnsupportedParameter

T = TypeVar("T")

MOST_AT_ONCE = 20
"""Items of one request."""


class _WithItems(ItemsBody, kw_only=True):
    """A request that brings items."""

    free_form: ClassVar[tuple[str, ...]] = ("items",)

    items: list[Item] | None = None


class CreateConversation(_WithItems, kw_only=True):
    """`POST /v1/conversations`."""

    metadata: dict[str, str] | None = None


class ChangeConversation(Body, kw_only=True):
    """`POST /v1/conversations/{id}`."""

    metadata: dict[str, str] | None = None


class CreateItems(_WithItems, kw_only=True):
    """`POST /v1/conversations/{id}/items`."""


class ConversationDeleted(msgspec.Struct):
    """The answer of `DELETE /v1/conversations/{id}`."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


@operation("POST", "/v1/conversations", body=CreateConversation, answers={200: Conversation}, refuses=(404,))
async def create_conversation(request: Request) -> Response:
    """Make a conversation, with items or without."""
    exchange = exchange_of(request)
    body = await read_json(request, CreateConversation, exchange)
    store, who = _store(exchange), exchange.caller.identity
    check_metadata(body.metadata)
    items, limit = _items(body), who.limits.response_bytes
    return json_response(await _done(lambda: store.create(who.tenant, limit, body.metadata or {}, items)))


@operation("GET", "/v1/conversations/{id}", answers={200: Conversation}, refuses=(404,))
async def get_conversation(request: Request) -> Response:
    """Show a conversation without its items."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _store(exchange)
    return json_response(await _done(lambda: store.find(exchange.caller.tenant, id)))


@operation(
    "POST",
    "/v1/conversations/{id}",
    body=ChangeConversation,
    answers={200: Conversation},
    refuses=(404,),
)
async def change_conversation(request: Request) -> Response:
    """Give a conversation other metadata."""
    exchange, id = exchange_of(request), request.path_params["id"]
    body = await read_json(request, ChangeConversation, exchange)
    check_metadata(body.metadata)
    store = _store(exchange)
    return json_response(await _done(lambda: store.change(exchange.caller.tenant, id, body.metadata or {})))


@operation("DELETE", "/v1/conversations/{id}", answers={200: ConversationDeleted}, refuses=(404,))
async def delete_conversation(request: Request) -> Response:
    """Delete a conversation with its items. Responses that belong to it stay."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _store(exchange)
    await _done(lambda: store.remove(exchange.caller.tenant, id))
    return json_response(ConversationDeleted(id))


@operation(
    "POST",
    "/v1/conversations/{id}/items",
    body=CreateItems,
    answers={200: ItemList},
    refuses=(404, 409),
)
async def create_items(request: Request) -> Response:
    """Put items behind those of a conversation."""
    exchange, id = exchange_of(request), request.path_params["id"]
    body = await read_json(request, CreateItems, exchange)
    store, who = _store(exchange), exchange.caller.identity
    items = _items(body)
    if not items:
        raise RequestError("`items` is empty.", param="items")
    await _done(lambda: store.add(who.tenant, who.limits.response_bytes, id, items))
    return json_response(item_list(items, False))


@operation("GET", "/v1/conversations/{id}/items", query=ListItems, answers={200: ItemList}, refuses=(404,))
async def list_items(request: Request) -> Response:
    """List a conversation's items, a page at a time, the newest first."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store, (after, limit, order) = _store(exchange), page_of(request)
    items, more = await _done(lambda: store.page(exchange.caller.tenant, id, after, limit, order))
    return json_response(item_list(items, more))


@operation("GET", "/v1/conversations/{id}/items/{item_id}", answers={200: dict[str, Any]}, refuses=(404,))
async def get_item(request: Request) -> Response:
    """Show an item of a conversation."""
    exchange, path = exchange_of(request), request.path_params
    store = _store(exchange)
    item = await _done(lambda: store.item(exchange.caller.tenant, path["id"], path["item_id"]))
    return Response(msgspec.json.encode(item), media_type="application/json")


@operation("DELETE", "/v1/conversations/{id}/items/{item_id}", answers={200: Conversation}, refuses=(404,))
async def delete_item(request: Request) -> Response:
    """Delete an item of a conversation."""
    exchange, path = exchange_of(request), request.path_params
    store, tenant = _store(exchange), exchange.caller.tenant
    return json_response(await _done(lambda: store.remove_item(tenant, path["id"], path["item_id"])))


def _items(body: _WithItems) -> list[KeptItem]:
    """The items as they are kept. Raises RequestError."""
    items = body.items or []
    if len(items) > MOST_AT_ONCE:
        raise RequestError(f"`items` may have at most {MOST_AT_ONCE} entries.", param="items")
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise UnsupportedParameter(
                f"`items[{index}]`: send the item itself, not a reference.", param=f"items[{index}]"
            )
    return kept_items(items)


def _store(exchange: Exchange) -> ConversationStore:
    if exchange.services.responses is None:
        raise NotFound("This server keeps no conversations.", code="no_conversations")
    return exchange.services.responses.conversations


async def _done(work: Callable[[], T]) -> T:
    """What `work` brings, in a thread: it waits for the disk."""
    return await to_thread.run_sync(work)
