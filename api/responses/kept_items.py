"""Items as they are kept and shown: each with an id, a status, and its text in pieces, as OpenAI has them."""

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from personae.api.responses import items as wire
from personae.api.responses import mcp_items as mcp
from personae.api.responses.item_ids import input_id
from personae.api.responses.items import Item

KeptItem = dict[str, Any]

_PREFIXES: dict[type, str] = {
    wire.MessageItem: "msg",
    wire.ReasoningItem: "rs",
    wire.FunctionCallItem: "fc",
    wire.CustomCallItem: "ctc",
    wire.FunctionResult: "fco",
    wire.CustomResult: "ctco",
    mcp.McpListItem: "mcpl",
    mcp.McpCallItem: "mcp",
    mcp.ApprovalRequest: "mcpr",
    mcp.ApprovalResponse: "mcpa",
}
_convert = msgspec.convert


def kept_items(items: Iterable[Item], response: str | None = None) -> list[KeptItem]:
    """The items of a request, in the form in which they are kept. Those without an id get one, which leads to
    the `response` if there is one."""
    return [_kept(item, response, place) for place, item in enumerate(items)]


def items_of(kept: Iterable[KeptItem]) -> list[Item]:
    """The items as a request has them."""
    return _convert(list(kept), list[Item])


def _kept(item: Item, response: str | None, place: int) -> KeptItem:
    found: KeptItem = {key: value for key, value in msgspec.to_builtins(item).items() if value is not None}
    found.setdefault("status", "completed")
    prefix = _PREFIXES[type(item)]
    id = f"{prefix}_{uuid.uuid4().hex}" if response is None else input_id(prefix, response, place)
    found.setdefault("id", id)
    if isinstance(item, wire.MessageItem):
        found["content"] = _pieces(item)
    return found


def _pieces(item: wire.MessageItem) -> list[KeptItem]:
    """The content in pieces."""
    if not isinstance(item.content, str):
        pieces = [msgspec.to_builtins(piece) for piece in item.content]
    else:
        kind = "output_text" if item.role == "assistant" else "input_text"
        pieces = [{"type": kind, "text": item.content}]
    for piece in pieces:
        if piece["type"] == "output_text":
            piece["annotations"] = piece.get("annotations") or []
    return pieces
