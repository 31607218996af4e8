"""What the caller asked the answer to be bound by; plain data, so that it can be part of a token log."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "json_object"]


class GrammarSpec(msgspec.Struct, frozen=True, tag=True):
    """A constraint in the form in which it was asked for.

    `source` is the schema as canonical JSON text for `json_schema`, "" for `json_object`. `strict` means:
    enforce all of it or refuse. Equal specs compile to the same grammar, so a spec is the key of the cache of
    compiled grammars.
    """

    kind: GrammarKind
    source: str = ""
    strict: bool = True
