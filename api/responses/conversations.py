"""Conversations: items that the server keeps, and that responses read and add to.

What a request adds is on disk before it is answered.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from personae.api.database.base import Connection
from personae.api.responses.items import Item
from personae.api.responses.kept_items import KeptItem, items_of
from personae.api.tenants.data import DataDir
from personae.errors import Conflict, NotFound, QuotaExceeded, RequestError
from personae.kernels.sizes import size_text

DEFAULT_BYTES = 256 * 2**20
"""What a tenant's conversations may take where its limit on responses does not say."""
MOST_ITEMS = 4096
_OVERHEAD = 256  # bytes that any item and any conversation count for, besides its text
_FIND = "select id, created, metadata from conversations where id = ? and tenant = ?"


class Conversation(msgspec.Struct):
    """A conversation as the API shows it, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class ConversationStore:
    """The conversations of a data directory. `clock` gives Unix time. All of it waits for the disk.

    `limit` is what a tenant's conversations may take, in bytes; None is the default.
    """

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self._data = data
        self._clock = clock

    def create(
        self, tenant: str, limit: int | None, metadata: Mapping[str, str], items: Sequence[KeptItem]
    ) -> Conversation:
        """Make a conversation. Raises QuotaExceeded."""
        made = Conversation(f"conv_{secrets.token_hex(24)}", int(self._clock()), dict(metadata))
        text = json.dumps(made.metadata)
        with self._data.write() as db:
            _check_room(db, tenant, limit, _size(items) + len(text) + _OVERHEAD)
            db.execute(
                "insert into conversations values (?, ?, ?, ?, ?)",
                (made.id, tenant, made.created_at, text, len(text) + _OVERHEAD),
            )
            _add_new(db, made.id, items)
        return made

    def find(self, tenant: str, id: str) -> Conversation:
        """The tenant's conversation. Raises NotFound."""
        with self._data.read() as db:
            return _found(db, tenant, id)

    def change(self, tenant: str, id: str, metadata: Mapping[str, str]) -> Conversation:
        """Give it other metadata. Raises NotFound."""
        with self._data.write() as db:
            found = _found(db, tenant, id)
            found.metadata = dict(metadata)
            db.execute("update conversations set metadata = ? where id = ?", (json.dumps(found.metadata), id))
        return found

    def remove(self, tenant: str, id: str) -> None:
        """Delete it with its items. Raises NotFound."""
        self.find(tenant, id)
        self._data.urgently(lambda db: db.execute("delete from conversations where id = ?", (id,)))

    def add(self, tenant: str, limit: int | None, id: str, items: Sequence[KeptItem]) -> None:
        """Put items behind the others. Raises NotFound, QuotaExceeded, or RequestError for too many."""
        with self._data.write() as db:
            _found(db, tenant, id)
            _check_room(db, tenant, limit, _size(items))
            (count,) = db.execute(
                "select count(*) from conversation_items where conversation = ?", (id,)
            ).fetchone()
            if count + len(items) > MOST_ITEMS:
                raise RequestError(f"A conversation may have at most {MOST_ITEMS} items.", param="items")
            _add_new(db, id, items)

    def append(self, db: Connection, id: str, items: Sequence[KeptItem]) -> None:
        """Put a response's items behind the others, in the transaction that stores the response. Of a
        conversation that was deleted meanwhile nothing stays."""
        if db.execute("select 1 from conversations where id = ?", (id,)).fetchone():
            _add(db, id, items)

    def check_room(self, tenant: str, limit: int | None) -> None:
        """Raises QuotaExceeded if the tenant may add nothing more."""
        with self._data.read() as db:
            _check_room(db, tenant, limit, _OVERHEAD)

    def items(self, tenant: str, id: str) -> list[Item]:
        """All items, the first first. Raises NotFound."""
        return items_of(self.page(tenant, id, None, MOST_ITEMS, "asc")[0])

    def page(
        self, tenant: str, id: str, after: str | None, limit: int, order: str
    ) -> tuple[list[KeptItem], bool]:
        """Some of the items, and whether there are more. Raises NotFound, also for an `after` that is not
        there."""
        newest = order == "desc"
        with self._data.read() as db:
            _found(db, tenant, id)
            place: int | None = None
            if after is not None:
                row = db.execute(
                    "select place from conversation_items where conversation = ? and id = ?", (id, after)
                ).fetchone()
                if row is None:
                    raise _no_item(after, "after")
                place = row["place"]
            rows = db.execute(
                "select item from conversation_items where conversation = ? "  # noqa: S608  our own words
                f"and (? is null or place {'<' if newest else '>'} ?) "
                f"order by place {'desc' if newest else 'asc'} limit ?",
                (id, place, place, limit + 1),
            ).fetchall()
        return [msgspec.json.decode(row["item"]) for row in rows[:limit]], len(rows) > limit

    def item(self, tenant: str, id: str, item: str) -> KeptItem:
        """One of the items. Raises NotFound."""
        with self._data.read() as db:
            _found(db, tenant, id)
            row = db.execute(
                "select item from conversation_items where conversation = ? and id = ?", (id, item)
            ).fetchone()
        if row is None:
            raise _no_item(item, "item_id")
        found: KeptItem = msgspec.json.decode(row["item"])
        return found

    def remove_item(self, tenant: str, id: str, item: str) -> Conversation:
        """Delete one of the items. Raises NotFound."""
        self.item(tenant, id, item)

        def change(db: Connection) -> Conversation:
            found = _found(db, tenant, id)
            db.execute("delete from conversation_items where conversation = ? and id = ?", (id, item))
            return found

        return self._data.urgently(change)


def _found(db: Connection, tenant: str, id: str) -> Conversation:
    row = db.execute(_FIND, (id, tenant)).fetchone()
    if row is None:
        raise NotFound(
            f"There is no conversation `{id[:80]}`.", param="conversation", code="conversation_not_found"
        )
    return Conversation(row["id"], row["created"], json.loads(row["metadata"]))


def _no_item(id: str, param: str) -> NotFound:
    return NotFound(f"The conversation has no item `{id[:80]}`.", param=param, code="item_not_found")


def _size(items: Sequence[KeptItem]) -> int:
    return sum(len(msgspec.json.encode(item)) + _OVERHEAD for item in items)


def _add_new(db: Connection, id: str, items: Sequence[KeptItem]) -> None:
    """Insert items. Raises Conflict for one that is there already."""
    if _add(db, id, items) < len(items):
        raise Conflict("The conversation has an item with the id of one of these.", param="items")


def _add(db: Connection, id: str, items: Sequence[KeptItem]) -> int:
    """Insert the items that are not stored yet. Returns how many it inserted."""
    added = 0
    for item in items:
        text = msgspec.json.encode(item)
        added += db.execute(
            "insert into conversation_items (conversation, id, bytes, item) values (?, ?, ?, ?) "
            "on conflict do nothing",
            (id, item["id"], len(text) + _OVERHEAD, text),
        ).rowcount
    return added


def _check_room(db: Connection, tenant: str, limit: int | None, more: int) -> None:
    """Raises QuotaExceeded if the tenant may not have so many bytes more."""
    most = DEFAULT_BYTES if limit is None else limit
    (used,) = db.execute(
        "select (select coalesce(sum(bytes), 0) from conversations where tenant = ?) + "
        "(select coalesce(sum(items.bytes), 0) from conversation_items as items "
        "join conversations on conversations.id = items.conversation where tenant = ?)",
        (tenant, tenant),
    ).fetchone()
    if used + more > most:
        raise QuotaExceeded(
            f"This tenant's conversations have {size_text(int(used), needed=True)}, and may have "
            f"{size_text(most)}; delete some.",
            param="conversation",
        )
