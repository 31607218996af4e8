"""The ids of stored items. Each contains its response's id, so that a reference leads to the response."""

import re

from personae.errors import RequestError

_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{16,64})[0-9a-f]{4}")
_RESPONSE = "resp_"
_INPUT = 0x8000  # where the places of a request's own items begin


def output_id(prefix: str, response: str, place: int) -> str:
    """The id of the item at a place of the response's output."""
    return f"{prefix}_{response.removeprefix(_RESPONSE)}{place:04x}"


def input_id(prefix: str, response: str, place: int) -> str:
    """The id of the item at a place of the input of the response's request."""
    return output_id(prefix, response, _INPUT + place)


def response_of(item: str) -> str | None:
    """The id of the response that the item is in. None if this is no item of a response."""
    found = _ITEM.fullmatch(item)
    return None if found is None else _RESPONSE + found[1]


def unknown_item(id: str, place: str) -> RequestError:
    """The error for a reference at `place` to an item that is not stored."""
    return RequestError(
        f"`{place}`: there is no stored item `{id[:80]}`; send the item itself.",
        param=place,
        code="item_not_found",
    )
