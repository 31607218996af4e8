"""Decides which unknown keys of a request are ignored. These are dropped before the body is decoded, and
listed.

A request is strict where it steers sampling or binds the answer. What comes back from earlier answers
(messages, calls), or only describes something (tools), may have keys of other servers and client libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import msgspec
from msgspec import inspect

from personae.api.wire.compat_names import field_here
from personae.grammar.fuzzy_match import nearest

MOST_NAMED = 64  # keys that are listed as ignored; a client may invent any number
_MOST_COMPARED = 64  # keys of a tool, each compared with the known ones
_BINDING = ("strict", "parameters")


class Tolerant(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a request whose unknown keys are ignored.

    If it is `watched`, a misspelled key, or a key that belongs elsewhere, is still refused, because it may be
    meant to bind the answer.
    """

    watched: ClassVar[bool] = False


@dataclass(slots=True)
class _Object:
    """The keys of one kind of object, and what may be below them. `struct` is None for a strict one."""

    path: str
    known: frozenset[str]
    struct: type[Tolerant] | None
    below: list[tuple[str, "_Accepted"]]


@dataclass(slots=True)
class _Accepted:
    """What one place accepts: objects by their tag, an object without one, a list."""

    tag_field: str | None = None
    tagged: dict[Any, _Object] = field(default_factory=dict)
    plain: _Object | None = None
    items: "_Accepted | None" = None

    def __bool__(self) -> bool:
        return bool(self.tagged or self.plain or self.items)


def drop_unknown_below(value: Mapping[str, Any], type: type[msgspec.Struct]) -> list[str]:
    """Drop, in place, what `type` ignores below its own fields. Returns the names, without numbers."""
    found: dict[str, None] = {}
    for name, place in _layout(type):
        if name in value:
            _drop(value[name], place, found)
    return list(found)


def _drop(value: Any, place: _Accepted, found: dict[str, None]) -> None:
    if isinstance(value, dict):
        object = place.plain
        if place.tag_field is not None and isinstance(tag := value.get(place.tag_field), str):
            object = place.tagged.get(tag, object)
        if object is None:
            return
        if object.struct is not None and (unknown := value.keys() - object.known):
            if object.struct.watched and len(unknown) > _MOST_COMPARED:
                return  # these are refused
            for key in sorted(unknown):
                if not _meant(object, key):
                    del value[key]
                    found[f"{object.path}.{key}" if len(found) < MOST_NAMED else "..."] = None
        for key, below in object.below:
            if key in value:
                _drop(value[key], below, found)
    elif isinstance(value, list) and place.items is not None:
        for item in value:
            _drop(item, place.items, found)


def _meant(object: _Object, key: str) -> bool:
    """Whether a key of a watched object was meant for a supported field."""
    if object.struct is None or not object.struct.watched:
        return False
    if nearest(key, object.known) is not None or key.startswith(_BINDING):
        return True
    known = {object.path.partition("[")[0], *object.known}
    return field_here(f"{object.path}.{key}", known) is not None


@cache
def _layout(type: type[msgspec.Struct]) -> list[tuple[str, _Accepted]]:
    """Where something may be dropped in a body of `type`; takes a millisecond the first time."""
    described = inspect.type_info(type)
    assert isinstance(described, inspect.StructType)
    return _below(described, "")


def _below(struct: inspect.StructType, path: str) -> list[tuple[str, _Accepted]]:
    places = []
    for one in struct.fields:
        name = one.encode_name
        if place := _place(_members(one.type), f"{path}.{name}" if path else name):
            places.append((name, place))
    return places


def _place(types: Sequence[inspect.Type], path: str) -> _Accepted:
    place = _Accepted()
    for one in types:
        if isinstance(one, inspect.ListType):
            place.items = _place(_members(one.item_type), f"{path}[]") or place.items
        elif isinstance(one, inspect.StructType):
            tolerant = one.cls if issubclass(one.cls, Tolerant) else None
            if (below := _below(one, path)) or tolerant is not None:
                known = {each.encode_name for each in one.fields} | {one.tag_field or ""}
                object = _Object(path, frozenset(known), tolerant, below)
                if one.tag_field is None:
                    place.plain = object
                else:
                    place.tag_field, place.tagged[one.tag] = one.tag_field, object
    return place


def _members(type: inspect.Type) -> Sequence[inspect.Type]:
    return type.types if isinstance(type, inspect.UnionType) else (type,)
