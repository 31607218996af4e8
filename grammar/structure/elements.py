"""The parts of an answer; together they are the `source` of a GrammarSpec of kind "structure".

An element says which texts are allowed, not how they are tokenized, with one exception. If the name of a
special token of the tokenizer appears in an `Exactly`, a `Verbatim` or an `Until`, it is that token.
Elsewhere special tokens are never allowed. So the same structure serves a model whose tags are tokens and one
that spells them out.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from personae.grammar.spec import GrammarSpec


class _Part(msgspec.Struct, frozen=True, tag=str.lower, tag_field="is"):
    """The base of the elements."""


class Exactly(_Part, frozen=True, omit_defaults=True):
    """This text. A space in it stands for up to two blanks (spaces, tabs, line breaks) or none; a `#` stands
    for a number of up to four digits.

    `or_json`: JSON that begins in the same way may be there instead. What is between the spaces are then
    tokens of JSON, and a space stands for as many blanks as JSON may have.
    """

    text: str
    or_json: bool = False


class Verbatim(_Part, frozen=True):
    """This text, with exactly these blanks."""

    text: str


class FreeText(_Part, frozen=True):
    """Any text, also the empty one, that contains none of `without` and begins with none of `openings`.

    Blanks at its beginning do not hide an opening.
    """

    without: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()


class Until(_Part, frozen=True):
    """Any text up to and including the first `end`. `without` and `openings` are as in `FreeText`.

    The name of a special token can be all of `end`, or its last part.
    """

    end: str
    openings: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Regex(_Part, frozen=True):
    """Text that a regular expression matches as a whole, and that contains none of `without`."""

    pattern: str
    param: str
    without: tuple[str, ...] = ()


class Lark(_Part, frozen=True):
    """Text of a grammar in llguidance's dialect of Lark. Errors name `param` as the field."""

    source: str
    param: str


class Json(_Part, frozen=True, omit_defaults=True):
    """JSON that satisfies `schema`. `strict`, `compact` and `any_order` are as in a GrammarSpec. Errors name
    `param` as the field. `openings` are the texts, in the form of an `Exactly`, with which it does not begin,
    because another alternative does.
    """

    schema: Any
    strict: bool
    param: str
    compact: bool = False
    any_order: bool = False
    openings: tuple[str, ...] = ()


class Concat(_Part, frozen=True):
    """One part after the other."""

    parts: "tuple[Element, ...]"


class OneOf(_Part, frozen=True):
    """Any one of the parts."""

    parts: "tuple[Element, ...]"


class Repeat(_Part, frozen=True):
    """The part, at least `least` times, and at most `most` times unless that is None."""

    part: "Element"
    least: int = 0
    most: int | None = None


Element = Exactly | Verbatim | FreeText | Until | Regex | Lark | Json | Concat | OneOf | Repeat


def structure_spec(element: Element) -> GrammarSpec:
    """The spec that binds an answer to `element`."""
    return GrammarSpec("structure", msgspec.json.encode(element).decode())


def compacted(spec: GrammarSpec) -> GrammarSpec:
    """The spec with no blanks between the tokens of its JSON. What is written out in a grammar or a regular
    expression stays as it is."""
    if spec.kind != "structure":
        return msgspec.structs.replace(spec, compact=spec.kind in ("json_schema", "json_object"))
    return _with_json(spec, lambda part: msgspec.structs.replace(part, compact=True))


def in_any_order(spec: GrammarSpec) -> GrammarSpec:
    """The spec with properties in any order, in all of its JSON."""
    if spec.kind != "structure":
        return msgspec.structs.replace(spec, any_order=spec.kind == "json_schema")
    return _with_json(spec, lambda part: msgspec.structs.replace(part, any_order=True))


def is_in_any_order(spec: GrammarSpec) -> bool:
    """Whether properties may come in any order in some of its JSON."""
    return spec.any_order or (spec.kind == "structure" and in_any_order(spec) == spec)


def _with_json(spec: GrammarSpec, change: Callable[[Json], Json]) -> GrammarSpec:
    element = replace_bound(
        decode_structure(spec.source), lambda part: change(part) if isinstance(part, Json) else part
    )
    return msgspec.structs.replace(spec, source=structure_spec(element).source)


# Built at import: msgspec reads a type when it is first decoded, and two threads that do so at once can
# crash.
_ELEMENTS: msgspec.json.Decoder[Element] = msgspec.json.Decoder(Element)


def decode_structure(source: str) -> Element:
    """The element in the source of a spec made by `structure_spec`."""
    return _ELEMENTS.decode(source)


def replace_bound(element: Element, change: Callable[[Json | Regex | Lark], Element]) -> Element:
    """The element with everything replaced that the caller wrote: schemas, patterns, grammars."""
    match element:
        case Json() | Regex() | Lark():
            return change(element)
        case Concat(parts=parts) | OneOf(parts=parts):
            return type(element)(tuple(replace_bound(part, change) for part in parts))
        case Repeat(part=part):
            return msgspec.structs.replace(element, part=replace_bound(part, change))
    return element
