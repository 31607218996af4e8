"""Scans JSON text before it is decoded: how much there is to decode, and whether an object repeats a key.

If two members have the same name, every decoder silently takes one, and not every decoder the same one (RFC
8259, section 4). So the server might act on something else than what a proxy has checked. And decoding
millions of small values holds the interpreter's lock all the time, while this scan releases it from string to
string.

The text need not be valid: the decoder refuses invalid text afterwards.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from personae.errors import PayloadTooLarge, RequestError

MOST_VALUES = 2**20
"""Elements of arrays and members of objects in one body."""
MOST_CONTAINERS = 2**17
"""Arrays, objects and members of objects in one body: each costs more than a number."""
_MOST_QUOTES = 2**20
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NO_BRACES = bytes(set(range(256)) - set(b"{}"))


def check_keys(text: bytes) -> None:
    """Raises RequestError for a key that is repeated in an object. For short text that has been decoded."""
    try:
        json.loads(text, object_pairs_hook=_members, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return  # the decoder accepted it, so there is no repeated key


def check_long_json(text: bytes) -> None:
    """`check_keys` for long text, which need not be valid, and raises PayloadTooLarge for too many values."""
    if text.count(b'"') > _MOST_QUOTES:
        raise _too_many()
    suspect = _too_many_values(text, [(0, len(text))])
    outside: list[tuple[int, int]] = []
    objects: list[set[bytes]] = []
    for string, begin, end in _between_strings(text):
        if suspect:
            outside.append((begin, end))
        if objects and _names(text, begin, end):
            key = _unescaped(string)
            if key in objects[-1]:
                raise _repeated(key.decode("utf-8", "replace"))
            objects[-1].add(key)
        if text.find(b"{", begin, end) >= 0 or text.find(b"}", begin, end) >= 0:
            _enter_and_leave(text[begin:end].translate(None, _NO_BRACES), objects)
    if suspect and _too_many_values(text, outside):
        raise _too_many()


def _members(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({name for name, _ in pairs}) < len(pairs):
        names = [name for name, _ in pairs]
        raise _repeated(next(name for place, name in enumerate(names) if name in names[:place]))


def _between_strings(text: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Each string as it is written, and where the text after it begins and ends; first the text before all
    strings."""
    start = text.find(b'"')
    yield b"", 0, len(text) if start < 0 else start
    while start >= 0:
        end = text.find(b'"', start + 1)
        while end >= 0 and _escaped(text, start, end):
            end = text.find(b'"', end + 1)
        if end < 0:
            return
        following = text.find(b'"', end + 1)
        yield text[start + 1 : end], end + 1, len(text) if following < 0 else following
        start = following


def _escaped(text: bytes, start: int, end: int) -> bool:
    """Whether the quote at `end` belongs to the string that begins at `start`."""
    before = end - 1
    while before > start and text[before] == _BACKSLASH:
        before -= 1
    return (end - 1 - before) % 2 == 1


def _names(text: bytes, begin: int, end: int) -> bool:
    """Whether a colon follows, so that the string before was a key."""
    while begin < end and text[begin] in b" \t\r\n":
        begin += 1
    return begin < end and text[begin] == ord(":")


def _unescaped(key: bytes) -> bytes:
    if b"\\" not in key:
        return key
    try:
        return msgspec.json.decode(b'"%s"' % key, type=str).encode("utf-8", "surrogatepass")
    except msgspec.DecodeError:
        return key  # the decoder will report it


def _enter_and_leave(braces: bytes, objects: list[set[bytes]]) -> None:
    for brace in braces:
        if brace == ord("{"):
            objects.append(set())
        elif objects:
            objects.pop()


def _too_many_values(text: bytes, spans: list[tuple[int, int]]) -> bool:
    """Whether these parts of the text have too many values, if none of the punctuation in them is within a
    string."""
    values = sum(text.count(b",", *span) for span in spans)
    containers = sum(text.count(mark, *span) for span in spans for mark in (b"[", b"{", b":"))
    return values > MOST_VALUES or containers > MOST_CONTAINERS


def _repeated(key: str) -> RequestError:
    name = key[:100].encode(errors="replace").decode()
    return RequestError(
        f"`{name}` is given twice in the same JSON object.", param=name, code="duplicate_parameter"
    )


def _too_many() -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The body's JSON has more than {MOST_VALUES} strings and other values, or more than "
        f"{MOST_CONTAINERS} arrays, objects and members.",
        param="body",
    )
