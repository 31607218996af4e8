"""Custom tools: their input is text. The model sees them as functions with one string argument."""

import json
import re
from typing import Any

from personae.grammar.structure.elements import Lark, Regex
from personae.grammar.tools.function import Function

CUSTOM_INPUT = "input"
"""The name of the argument."""

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|(?:\\u[0-9a-fA-F]{4}){2})*')
_LONGEST_OPENING = 64


def custom_function(name: str, text: Regex | Lark | None, param: str) -> Function:
    """The function of a custom tool whose input `text` binds."""
    value: dict[str, Any] = {"type": "string"}
    if isinstance(text, Regex):
        value["pattern"] = f"^(?:{text.pattern})$"
    return Function(name, input_schema(value), True, param, custom=True, text=text)


def input_schema(value: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments; `value` is that of the input."""
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: value},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


class InputReader:
    """Extracts the input from the arguments, JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._opened = False

    def push(self, piece: str) -> str:
        """What the next piece adds to the input."""
        self._held += piece
        if not self._opened:
            found = _OPENING.match(self._held)
            if found is None:
                self._held = self._held[:_LONGEST_OPENING]
                return ""
            self._opened = True
            self._held = self._held[found.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None, "it also matches the empty text"
        self._held = self._held[whole.end() :]
        return str(json.loads(f'"{whole[0]}"', strict=False))
