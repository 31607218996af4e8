"""What may be called, as far as a grammar and a parser have to know it."""

from dataclasses import dataclass
from typing import Any

from personae.grammar.structure.elements import Lark, Regex

NAME = r"[A-Za-z0-9_.-]"
"""What names of functions are made of."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is the JSON Schema of its arguments, an object.

    `strict`: all of the schema is enforced; otherwise as much as can be. Errors name `param` as their field.
    A `custom` tool has one argument, `input`; `text` binds that, if anything does.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str
    custom: bool = False
    text: Regex | Lark | None = None
