"""The constraint on an answer as the caller asked for it: plain data, so that it can be part of a token
log."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structure"]


class ReasoningLimit(msgspec.Struct, frozen=True):
    """At most so many tokens of reasoning, between the texts `open` and `close`. `opened`: the prompt has
    opened it.

    `again`: reasoning may be opened several times, until `text` opens the answer itself; the limit covers all
    of it. `others` open messages that are neither.
    """

    tokens: int
    open: str
    close: str
    opened: bool = False
    again: bool = False
    others: tuple[str, ...] = ()
    text: str = ""


class GrammarSpec(msgspec.Struct, frozen=True, tag=True):
    """A constraint in the form in which it was asked for.

    `source` is canonical JSON text of the schema for `json_schema` or of the list of strings for
    `choice`, the text itself for `regex`, `ebnf` (llama.cpp's GBNF) and `lark` (llguidance's dialect), ""
    for `json_object`, and an element as JSON text for `structure` (structure/elements.py). `strict` is
    for schemas: enforce all of it or refuse; otherwise bind as much as possible. `compact` is for schemas
    and objects: no blanks between two tokens of JSON. `any_order` is for schemas: properties may come in
    any order instead of the schema's. `reasoning` limits the reasoning that a `structure` begins with.
    `backend` is the only one that may enforce it, None for any. `checked`: no grammar enforces its strict
    schemas completely, so each token is checked (checked/). `sets` is for `lark`: where JSON with sets is
    (`tracked/places.py`, as JSON text). The compiler sets these two, not the caller. Equal specs compile
    to the same grammar, so a spec and its tenant are the key of the cache of compiled grammars.
    """

    kind: GrammarKind
    source: str = ""
    strict: bool = True
    reasoning: ReasoningLimit | None = None
    backend: str | None = None
    compact: bool = False
    any_order: bool = False
    checked: bool = False
    sets: str = ""


GrammarKey = tuple[str, GrammarSpec]
"""A tenant and a spec. A grammar of one tenant is compiled again for another, who could otherwise learn from
the time that somebody has sent it before."""
