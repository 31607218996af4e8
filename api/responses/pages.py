"""Lists of items, a page at a time, as OpenAI has them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from personae.api.files.routes import page_size
from personae.api.responses.kept_items import KeptItem
from personae.errors import RequestError

_DEFAULT, _MOST = 20, 100


class ListItems(msgspec.Struct):
    """What lists of items may be asked for. `include` changes nothing."""

    after: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=_MOST)] = _DEFAULT
    order: Literal["asc", "desc"] = "desc"
    include: str | UnsetType = UNSET


class ItemList(msgspec.Struct):
    """A page of items."""

    data: Sequence[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


def page_of(request: Request) -> tuple[str | None, int, str]:
    """After which item, how many, in which order. Raises RequestError."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("`order` must be asc or desc.", param="order")
    return request.query_params.get("after"), page_size(request, _DEFAULT, _MOST), order


def item_list(items: Sequence[KeptItem], more: bool) -> ItemList:
    """A page as an answer."""
    first, last = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return ItemList(items, more, first, last)
