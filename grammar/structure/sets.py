"""Finds where JSON is in a structure, so that a matcher can read along and see the items of sets."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    OneOf,
    Repeat,
    Until,
    Verbatim,
)
from personae.grammar.tracked.places import Places, Thought, comes_after

_MOST_WAYS = 512


class _Unseen(Exception):
    """It is not known by the text where JSON begins."""


class _Before(NamedTuple):
    """The end of the text before an element, as far as it is known; None if it may be any text. `start`: that
    is all of the text."""

    text: str | None
    start: bool


def places(element: Element) -> Places | None:
    """None if a matcher could not tell where JSON begins. It can after nothing but reasoning, and where a
    call's arguments are an object behind a text that nothing else has."""
    parts = element.parts if isinstance(element, Concat) else (element,)
    thought = _thought(parts[0]) if parts else None
    rest = parts if thought is None else parts[1:]
    reader = _Reader()
    try:
        reader.read(Concat(rest), frozenset((_Before("", True),)))
    except _Unseen:
        return None
    found = reader.found
    at_start = [text for text in found if not text.strip()]
    if at_start and len(found) > 1:
        return None
    for (text, schema), (other, another) in combinations(found.items(), 2):
        if schema != another and (comes_after(text, other) or comes_after(other, text)):
            return None
    schemas = tuple((text, schema) for text, schema in found.items() if isinstance(schema, dict))
    return Places(schemas, thought, reader.any_order)


def _thought(part: Element) -> Thought | None:
    match part:
        case Until(end=end):
            return Thought("", end)
        case Repeat(part=Concat(parts=(Exactly(text=opening), Until(end=end))), least=0, most=1):
            return Thought(opening, end)
    return None


class _Reader:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        """The schemas of JSON, by the text before it."""
        self.any_order = False

    def read(self, element: Element, before: frozenset[_Before]) -> frozenset[_Before]:
        """What may be before what follows the element. Raises _Unseen."""
        match element:
            case Exactly(text=text) | Verbatim(text=text):
                return frozenset(
                    _Before(None if one.text is None else one.text + text, one.start) for one in before
                )
            case Until(end=end):
                return frozenset(_Before(None if one.text is None else end, False) for one in before)
            case FreeText():
                return frozenset((_Before(None, False),))
            case Json(schema=schema, any_order=any_order):
                self.any_order |= any_order
                for one in before:
                    self._add(one, schema)
                return frozenset((_Before("", False),))
            case Concat(parts=parts):
                for part in parts:
                    before = self.read(part, before)
                return before
            case OneOf(parts=parts):
                return _few(way for part in parts for way in self.read(part, before))
            case Repeat(part=part, most=most):
                after = self.read(part, before)
                if most != 1:
                    after |= self.read(part, after)
                return _few(before | after)
        raise _Unseen

    def _add(self, before: _Before, schema: Any) -> None:
        if before.text is None:
            raise _Unseen
        if not before.start and not (before.text.strip() and _is_of_objects(schema)):
            raise _Unseen
        if before.start and before.text.strip() and not _is_of_objects(schema):
            raise _Unseen
        if self.found.setdefault(before.text, schema) != schema:
            raise _Unseen


def _few(ways: Iterable[_Before]) -> frozenset[_Before]:
    found = frozenset(ways)
    if len(found) > _MOST_WAYS:
        raise _Unseen
    return found


def _is_of_objects(schema: Any) -> bool:
    """Whether all values are objects: text in a string of its own would not be seen to be in a string."""
    return isinstance(schema, dict) and schema.get("type") == "object"
