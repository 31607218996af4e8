"""What the caller asked the answer to be bound by; plain data, so that it can be part of a token log."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structure"]


class GrammarSpec(msgspec.Struct, frozen=True, tag=True):
    """A constraint in the form in which it was asked for.

    `source` is canonical JSON text of the schema for `json_schema` or of the list of strings for `choice`,
    the text itself for `regex`, `ebnf` (llama.cpp's GBNF) and `lark` (llguidance's dialect), "" for
    `json_object`, an element as JSON text for `structure` (structure/elements.py). `strict` is for schemas:
    enforce all of it or refuse; otherwise bind what can be bound.
    Equal specs compile to the same grammar, so a spec is the key of the cache of compiled grammars.
    """

    kind: GrammarKind
    source: str = ""
    strict: bool = True
