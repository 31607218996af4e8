"""Reads the arguments of a call in any format, and passes them on as a JSON object."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from personae.grammar.structure.reader import Reader, Steps
from personae.grammar.tools.arguments import KeyedArguments, Kind
from personae.grammar.tools.function import Function

_MARK = "\ud800-\udfff"  # no text has these; see marks.py
_OUTSIDE = re.compile(rf'["{{}}\[\]{_MARK}]')
_IN_STRING = re.compile(rf'["\\{_MARK}]')
_WORD = re.compile(r"[A-Za-z0-9+.-]")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

Emit = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ArgumentTexts:
    """`put` writes marks into a format's texts, `strip` removes them from a model's, `emit` receives JSON."""

    put: Callable[[str], str]
    strip: Callable[[str], str]
    emit: Emit


def read_json(reader: Reader, emit: Emit) -> Steps[bool]:
    """A JSON object, array or string, as it arrives. False if it does not end."""
    scanner = _Scanner()
    while not scanner.ended and (yield from reader.more()):
        reader.scan(scanner.scan, emit)
    return scanner.complete


def read_keyed(
    reader: Reader, style: KeyedArguments, function: Function | None, end: str, texts: ArgumentTexts
) -> Steps[bool]:
    """Arguments one by one, and `end` after them. False if something else is there."""
    put, emit = texts.put, texts.emit
    before, after_key = put(style.before_key).lstrip(" "), put(style.after_key)
    end = put(end).lstrip(" ")
    emit("{")
    first = True
    while True:
        passed = yield from reader.either(before, end)
        if passed == end:
            emit("}")
            return True
        key = yield from reader.characters(lambda char: char != after_key[0] and not char.isspace())
        if passed is None or not key or not (yield from reader.take(after_key)):
            return False
        emit(("" if first else ", ") + json.dumps(texts.strip(key), ensure_ascii=False) + ": ")
        if not (yield from _value(reader, style, style.kind(function, key), texts)):
            return False
        if first:
            first, before = False, put(style.between + style.before_key).lstrip(" ")


def _value(reader: Reader, style: KeyedArguments, kind: Kind, texts: ArgumentTexts) -> Steps[bool]:
    """A value and what comes after it."""
    after, quote = texts.put(style.after_value), texts.put(style.quote)
    if quote and (yield from reader.opens(quote)):
        return (yield from _string(reader, quote, texts)) and (yield from reader.take(after))
    if kind == "text or null" and (yield from reader.opens("null" + after)):
        texts.emit("null")
        return True
    if kind != "json":
        return (yield from _string(reader, after, texts))
    yield from reader.take(" ")
    if (yield from reader.peek()) in ('"', "[", "{"):
        return (yield from read_json(reader, texts.emit)) and (yield from reader.take(after))
    word = yield from reader.characters(_WORD.match)
    word = {spelled: name for name, spelled in style.constants.items()}.get(word, word)
    if not _SCALAR.fullmatch(word):
        return False
    texts.emit(word)
    return (yield from reader.take(after))


def _string(reader: Reader, end: str, texts: ArgumentTexts) -> Steps[bool]:
    """Text up to `end`, as a JSON string."""

    def emit(text: str) -> None:
        texts.emit(json.dumps(texts.strip(text), ensure_ascii=False)[1:-1])

    texts.emit('"')
    if not (yield from reader.until(end, emit)):
        return False
    texts.emit('"')
    return True


class _Scanner:
    """Finds the end of a JSON object, array or string that arrives in pieces. A special token breaks it
    off."""

    def __init__(self) -> None:
        self.ended = False
        self.complete = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from `at`. Returns where the value ends, or the text's length."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                if not "\ud800" <= text[at] <= "\udfff":  # nothing hides a special token
                    at += 1
                    continue
            found = (_IN_STRING if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            char = found[0]
            if char == '"':
                self._quoted = not self._quoted
            elif char == "\\":
                self._escaped = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                self.ended = True
                return at - 1
            if self._depth == 0 and not self._quoted and not self._escaped:
                self.ended = self.complete = True
                return at
        return len(text)
