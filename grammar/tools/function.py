"""The functions that may be called, as far as a grammar and a parser must know them."""

from dataclasses import dataclass
from typing import Any

from personae.grammar.structure.elements import Lark, Regex

NAME = r"[A-Za-z0-9_.-]"
"""The characters of functions' names."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is the JSON Schema of its arguments, an object.

    `strict`: all of the schema is enforced; otherwise as much as possible. Errors name `param` as the field.
    A `custom` tool has one argument, `input`; `text` binds it if it is bound.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str
    custom: bool = False
    text: Regex | Lark | None = None
