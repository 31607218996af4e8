"""A finished JSON text, with the place of each of its values, and small changes to it."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from personae.grammar.checked.pattern_endings import ending

_BLANKS = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}]+")
_NUMBER = re.compile(r"-?(?:[1-9]|0.)[0-9.eE+-]*")  # that may have one more digit
_TEXTS = "a0-A 1"
_DIGITS = "0123456789"

Steps = Sequence[str | int]


class Member(NamedTuple):
    """A member of an object or array: where it begins, with its name if it has one; where the name ends; the
    name or index; the value."""

    start: int
    named: int
    step: str | int
    node: "Node"


@dataclass(slots=True)
class Node:
    """A value of a text, from `start` to `end`. `kind` is its first character."""

    start: int
    end: int
    kind: str
    members: list[Member] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether it is an object or an array."""
        return self.kind in "{["

    def within(self) -> Iterator["Node"]:
        """The value itself and all values in it, outermost first."""
        yield self
        for member in self.members:
            yield from member.node.within()


def parsed(text: str) -> Node:
    """The outermost value of a JSON text. Raises ValueError or RecursionError for any other text."""
    return _value(text, _after_blanks(text, 0))


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def _value(text: str, at: int) -> Node:
    kind = text[at : at + 1]
    if kind in ("{", "["):
        return _container(text, at, kind)
    found = (_STRING if kind == '"' else _SCALAR).match(text, at)
    if found is None:
        raise ValueError(f"no value at {at}")
    return Node(at, found.end(), kind)


def _container(text: str, at: int, kind: str) -> Node:
    node, close = Node(at, at, kind), "}" if kind == "{" else "]"
    at = _after_blanks(text, at + 1)
    while text[at : at + 1] != close:
        start = named = at
        step: str | int = len(node.members)
        if kind == "{":
            name = _STRING.match(text, at)
            if name is None:
                raise ValueError(f"no name at {at}")
            step, named = json.loads(name[0]), name.end()
            at = _after_blanks(text, _after_blanks(text, named) + 1)
        value = _value(text, at)
        node.members.append(Member(start, named, step, value))
        at = _after_blanks(text, value.end)
        if text[at : at + 1] == ",":
            at = _after_blanks(text, at + 1)
        elif text[at : at + 1] != close:
            raise ValueError(f"neither a comma nor {close} at {at}")
    node.end = at + 1
    return node


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these members. Raises ValueError if a name comes twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name comes twice")
    return made


def loaded(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError or RecursionError if it is none, or a name comes twice."""
    return json.loads(text, object_pairs_hook=unique)


def without_repeats(text: str, written: int) -> str:
    """The JSON text without members whose name comes earlier in their object, unless they are written
    already: the first `written` characters are the same. Another text is returned as it is."""
    with suppress(ValueError, RecursionError):
        while (repeat := _repeat(parsed(text), written)) is not None:
            text = text[: repeat[0]] + text[repeat[1] :]
    return text


def _repeat(root: Node, written: int) -> tuple[int, int] | None:
    """Where the comma before a repeated member begins, and where the member ends."""
    for node in root.within():
        names: set[str | int] = set()
        for index, member in enumerate(node.members):
            before = node.members[index - 1].node.end
            if member.step in names and before >= written:
                return before, member.node.end
            names.add(member.step)
    return None


def changes(
    text: str,
    written: int,
    places: Iterable[Steps],
    names: Sequence[str],
    values: Sequence[str],
    members: Sequence[str] = (),
    patterns: Sequence[tuple[str, ...]] = (),
) -> Iterator[str]:
    """Texts that differ from `text` in one value or member. Their first `written` characters are the same.

    `places` are where something is wrong: what is there, and what is around and within it, is changed, in
    turn. An object gets new `members`, or others of `names`. Every value may become or get one of `values`.
    Values and members are JSON. Strings and names that are not written to their end may end so that they
    match all of one of `patterns`.
    """
    ways: list[Iterator[str]] = []
    for node in _nodes(parsed(text), places):
        if node.end >= written:
            ways.append(_replaced(text, written, node.start, node.end, values))
        if node.holds:
            there = dict.fromkeys(text[member.node.start : member.node.end] for member in node.members)
            if node.kind == "{":
                ways.append(_added(text, written, node, members))
            ways.append(_with_more(text, written, node, names, [*there, *values]))
            ways.append(_with_less(text, written, node))
            if node.kind == "{":
                for member in node.members:
                    ways.append(_ended(text, written, member.start, member.named, patterns))
                    ways.append(_renamed(text, written, member, names, members))
        elif node.kind == '"' and node.end > written:
            ways.append(_ended(text, written, node.start, node.end, patterns))
            again = text[max(node.start + 1, node.end - 3) : node.end - 1].replace("\\", "")
            ways.append(_longer(text, node.end - 1, dict.fromkeys((*again, *_TEXTS))))
        elif _NUMBER.fullmatch(text, node.start, node.end) and node.end >= written:
            ways.append(_longer(text, node.end, _DIGITS))
    while ways:  # one of each in turn
        going = []
        for way in ways:
            if (changed := next(way, None)) is not None:
                yield changed
                going.append(way)
        ways = going


def _nodes(root: Node, places: Iterable[Steps]) -> Iterator[Node]:
    seen: set[int] = set()
    for steps in places:
        around = [root]
        for step in steps:
            # The validator gives names that are numbers as numbers.
            found = (member.node for member in around[-1].members if str(member.step) == str(step))
            inner = next(found, None)
            if inner is None:
                break
            around.append(inner)
        for node in (*reversed(around), *around[-1].within()):
            if id(node) not in seen:
                seen.add(id(node))
                yield node


def _replaced(text: str, written: int, start: int, end: int, values: Iterable[str]) -> Iterator[str]:
    """With another value that begins as what is written of it."""
    begun = text[start : max(written, start)]
    yield from (text[:start] + one + text[end:] for one in values if one.startswith(begun))


def _longer(text: str, at: int, more: Iterable[str]) -> Iterator[str]:
    yield from (text[:at] + one + text[at:] for one in more)


def _ended(
    text: str, written: int, start: int, end: int, patterns: Iterable[tuple[str, ...]]
) -> Iterator[str]:
    """With another end of a string that is not written to its end, which then matches patterns."""
    if end <= written or text[start] != '"':
        return
    begun = text[start : max(written, start + 1)]
    with suppress(ValueError):  # in the middle of an escape
        content = json.loads(begun + '"')
        for more in dict.fromkeys(ending(one, content) for one in patterns):
            if more is not None:
                yield text[:start] + begun + more + text[end - 1 :]


def _renamed(
    text: str, written: int, member: Member, names: Iterable[str], members: Iterable[str]
) -> Iterator[str]:
    """With another member instead of one whose name is not written yet, with another name, or a longer
    one."""
    if member.named > written:
        yield from _replaced(text, written, member.start, member.node.end, members)
        quoted = (json.dumps(name, ensure_ascii=False) for name in names)
        yield from _replaced(text, written, member.start, member.named, quoted)
        yield from _longer(text, member.named - 1, _TEXTS)


def _with_more(
    text: str, written: int, node: Node, names: Sequence[str], values: Sequence[str]
) -> Iterator[str]:
    """With a new member at the end, or before one that is not written yet."""
    there = {member.step for member in node.members}
    fresh = [json.dumps(name, ensure_ascii=False) + ":" for name in names if name not in there]
    for value in values:
        yield from _added(
            text, written, node, [f"{begun}{value}" for begun in (fresh if node.kind == "{" else [""])]
        )


def _added(text: str, written: int, node: Node, members: Iterable[str]) -> Iterator[str]:
    ats = [member.start for member in node.members if member.start >= written]
    comma = "," if node.members else ""
    for member in members:
        if node.end - 1 >= written:
            yield f"{text[: node.end - 1]}{comma}{member}{text[node.end - 1 :]}"
        for at in ats:
            yield f"{text[:at]}{member},{text[at:]}"


def _with_less(text: str, written: int, node: Node) -> Iterator[str]:
    """Without one of the members that are not written yet."""
    for index, member in enumerate(node.members):
        if index + 1 < len(node.members):
            if member.start >= written:
                yield text[: member.start] + text[node.members[index + 1].start :]
        elif index:
            before = node.members[index - 1].node.end
            if before >= written:
                yield text[:before] + text[member.node.end :]
        elif member.start >= written:
            yield text[: member.start] + text[member.node.end :]
