"""Checks finished answers against their schemas. A check that may take long runs in a child process that the
kernel ends.

A validator follows every reference anew, so a schema of a kilobyte can keep it busy for hours, and it holds
the interpreter's lock meanwhile. A check that is known to be quick runs at once.
"""

import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from personae.errors import GrammarError
from personae.grammar.sandbox.children import Children
from personae.grammar.sandbox.server import SandboxLimits, SandboxServer, request_of, send_frame
from personae.grammar.sandbox.small import is_plain
from personae.grammar.schema.validate import SchemaValidation, validate_answer
from personae.grammar.schema.walk import target
from personae.grammar.spec import GrammarSpec

AnswerToCheck = tuple[GrammarSpec, str]
"""A spec of kind `json_schema`, and the answer's text."""

_COMMAND = "from personae.grammar.sandbox.checker import main; main()"
_LIMITS = SandboxLimits(processor=1.0, patience=5.0)
_WORK = 2**13  # nodes of a schema with its references followed, times characters of an answer: at most 20 ms
_LENGTH = 8192  # characters of a schema
_BACKTRACKING = re.compile(r"\(\?[=!<]|\\[1-9k]")
_NOT_FOLLOWED = frozenset({"$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"})
_OUTCOMES: msgspec.msgpack.Decoder[list[SchemaValidation]] = msgspec.msgpack.Decoder(list[SchemaValidation])


def check_at_once(parts: Sequence[AnswerToCheck]) -> list[SchemaValidation] | None:
    """The outcomes, in order. None if it is not certain beforehand that they take only milliseconds.

    Raises GrammarError if a schema is malformed.
    """
    left = _WORK
    for spec, answer in parts:
        left -= max(len(answer), 1) * _nodes(spec.source, left // max(len(answer), 1) + 1)
        if left < 0:
            return None
    return [validate_answer(spec, answer) for spec, answer in parts]


def _nodes(source: str, most: int) -> int:
    """The number of values in a schema, counting those that a reference leads to at each reference. `most` if
    it is at least that, or if the schema contains something that is not understood here."""
    if len(source) > _LENGTH:
        return most
    try:
        document = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        return 1  # refused at once
    count, left = 0, [document]
    while left and count < most:
        one = left.pop()
        count += 1
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            if not _understood(one, one is document):
                return most
            left += one.values()
            if "$ref" in one:
                left.append(target(document, one["$ref"]))
    return count


def _understood(schema: dict[str, Any], outermost: bool) -> bool:
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    if reference[1:2] not in ("", "/"):  # an anchor
        return False
    if not outermost and (isinstance(schema.get("$id"), str) or isinstance(schema.get("id"), str)):
        return False  # references in it are relative to it
    patterns = [*schema.get("patternProperties", ())] if _is_object(schema, "patternProperties") else []
    patterns += [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return schema.keys().isdisjoint(_NOT_FOLLOWED) and all(
        is_plain(one) and not _BACKTRACKING.search(one) for one in patterns
    )


def _is_object(schema: dict[str, Any], name: str) -> bool:
    return isinstance(schema.get(name), dict)


class Checker(SandboxServer):
    """Runs checks in the child processes. Thread-safe."""

    def __init__(self, limits: SandboxLimits = _LIMITS) -> None:
        super().__init__(_COMMAND, limits, limits)

    def check(self, parts: Sequence[AnswerToCheck]) -> list[SchemaValidation] | None:
        """The outcomes, in order. None if they are not known within the limits, or a schema is malformed."""
        with suppress(OSError):  # a time-out is one of them
            for frame in self.ask(b"c", msgspec.msgpack.encode(parts)):
                return _OUTCOMES.decode(frame)
        return None


def main() -> None:
    """The server's main function."""
    os.nice(5)
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SandboxLimits)
    parts = msgspec.msgpack.Decoder(list[AnswerToCheck])

    def warm_up() -> None:
        validate_answer(GrammarSpec("json_schema", '{"pattern": "a", "format": "date"}'), '"b"')

    def answer(kind: bytes, connection: socket.socket) -> None:
        with suppress(GrammarError):
            outcomes = [validate_answer(*part) for part in parts.decode(request_of(connection))]
            send_frame(connection, msgspec.msgpack.encode(outcomes))

    warm_up()
    Children(control, limits, answer, warm_up).serve()
