"""What the parts of a structure say about its answers: how far from their ends they can be, and which texts
lead there."""

import itertools
from collections.abc import Iterator

import msgspec

from personae.grammar.budget.analysis import Entry
from personae.grammar.budget.distance_bound import (
    DistanceBound,
    Measure,
    grammar_literals,
    guessed,
    pattern_bound,
    text_bound,
)
from personae.grammar.budget.schema_bound import schema_bound
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    Lark,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)

_MOST_LITERALS = 1024
_MOST_ENTRIES = 512
_MOST_WAYS = 4  # to one part


def structure_bound(element: Element, measure: Measure) -> DistanceBound:
    """The bounds of the answers of a structure that contains the schemas that are enforced."""
    exits = sorted(set(filter(None, _exits(element, ()))), key=lambda text: (len(text), text))
    bound = _bound(element, measure)
    literals = dict.fromkeys((*bound.literals, *filter(None, _literals(element))))
    ends = bound.number_ends
    if ends is not None:
        ends = tuple(sorted({*ends, *_behind_json(element, ())} - {""}))
    return msgspec.structs.replace(
        bound, exits=tuple(exits), literals=tuple(literals)[:_MOST_LITERALS], number_ends=ends
    )


def _behind_json(element: Element, after: tuple[str, ...]) -> Iterator[str]:
    """The fixed texts that may follow JSON. `after` are those that may follow the element itself."""
    match element:
        case Json():
            yield from after
        case Concat(parts=parts):
            for part in reversed(parts):
                yield from _behind_json(part, after)
                heads = _heads(part)
                after = (*heads, *after) if "" in heads or isinstance(part, Repeat) else heads
        case OneOf(parts=parts):
            for part in parts:
                yield from _behind_json(part, after)
        case Repeat(part=part):
            yield from _behind_json(part, (*_heads(part), *after))


def _literals(element: Element) -> Iterator[str]:
    """The fixed texts, divided at numbers."""
    match element:
        case Exactly(text=text):
            yield from text.replace(" ", "").split("#")
        case Verbatim(text=text):
            yield text
        case Concat(parts=parts) | OneOf(parts=parts):
            for part in parts:
                yield from _literals(part)
        case Repeat(part=part):
            yield from _literals(part)


def _exits(element: Element, after: tuple[str, ...]) -> Iterator[str]:
    """The fixed texts that follow repetitions. `after` are those that may follow the element itself."""
    match element:
        case Concat(parts=parts):
            for part in reversed(parts):
                yield from _exits(part, after)
                if not isinstance(part, Repeat) or part.least:  # what may be left out leads further away
                    after = _heads(part)
        case OneOf(parts=parts):
            for part in parts:
                yield from _exits(part, after)
        case Repeat(part=part):
            heads = [head for head in _heads(part) if head]
            yield from (text for text in after if not any(head.startswith(text) for head in heads))
            yield from _exits(part, ())


def _heads(element: Element) -> tuple[str, ...]:
    """The fixed texts with which an element may begin; "" if it may begin otherwise."""
    while isinstance(element, Repeat) or (isinstance(element, Concat) and element.parts):
        element = element.part if isinstance(element, Repeat) else element.parts[0]
    if isinstance(element, OneOf):
        return tuple(dict.fromkeys(head for part in element.parts for head in _heads(part)))
    return (_head(element),)


def _head(element: Element) -> str:
    """The fixed text with which an element begins; "" if it begins otherwise."""
    while isinstance(element, Concat) and element.parts:
        element = element.parts[0]
    return _fixed(element) if isinstance(element, Exactly | Verbatim) else ""


def _differ(heads: list[str]) -> bool:
    """Whether none of them is the beginning of another."""
    heads = sorted(heads)
    return not any(after.startswith(before) for before, after in itertools.pairwise(heads))


def _fixed(part: Exactly | Verbatim) -> str:
    """The text without the blanks and the number, which may be left out or differ."""
    return part.text if isinstance(part, Verbatim) else part.text.replace(" ", "").split("#")[0]


def _bound(element: Element, measure: Measure) -> DistanceBound:
    match element:
        case Exactly(text=text) | Verbatim(text=text):
            return text_bound(measure, [text, "0000" * text.count("#")])
        case FreeText(without=without, openings=openings):
            return text_bound(measure, [], barred=(*without, *openings))
        case Until(end=end, openings=openings, without=without):
            return text_bound(measure, [], [end], barred=(*openings, *without))
        case Regex(pattern=pattern, without=without):
            return text_bound(measure, [], barred=without).then(pattern_bound(pattern))
        case Lark(source=source):
            return guessed(1, grammar_literals(source))
        case Json(schema=schema, any_order=any_order):
            bound = schema_bound(schema, measure, any_order=any_order)
            return msgspec.structs.replace(bound, rest=bound.rest + bound.lexeme, roots=0, blanks=False)
        case Concat(parts=parts):
            total = DistanceBound(texts=True, endless=True)
            for part in parts:
                total = total.then(_bound(part, measure))
            return total
        case OneOf(parts=parts):
            total = DistanceBound(texts=True, endless=True)
            for part in parts:
                total = total.either(_bound(part, measure))
            return (
                total
                if _differ([_head(part) for part in parts])
                else msgspec.structs.replace(total, texts=False)
            )
        case Repeat(part=part, least=least):
            once = _bound(part, measure)
            return msgspec.structs.replace(once, rest=once.rest * max(least, 1))


def entries(element: Element) -> tuple[Entry, ...]:
    """Where answers reach the parts that the caller wrote, except for parts after other such parts."""
    return tuple(itertools.islice((entry for entry, _ in _entries(element, "") if entry), _MOST_ENTRIES))


def _entries(element: Element, before: str) -> Iterator[tuple[Entry | None, str]]:
    """Entries after the text `before`, and (None, text) for each text that may come before what follows."""
    match element:
        case Exactly() | Verbatim():
            yield None, before + _spelled(element)
        case FreeText():
            yield None, before
        case Until(end=end):
            yield None, before + end
        case Json(param=param) | Regex(param=param) | Lark(param=param):
            yield Entry(before, param), ""
        case OneOf(parts=parts):
            for part in parts:
                yield from _entries(part, before)
        case Repeat(part=part, least=least):
            yield from _entries(part, before)
            if not least:
                yield None, before
        case Concat(parts=parts):
            yield from _entries_in_turn(parts, before)


def _entries_in_turn(parts: tuple[Element, ...], before: str) -> Iterator[tuple[Entry | None, str]]:
    if not parts:
        yield None, before
        return
    passed: dict[str, None] = {}
    for entry, text in _entries(parts[0], before):
        if entry is None:
            passed[text] = None
        else:
            yield entry, ""
    for text in list(passed)[:_MOST_WAYS]:
        yield from _entries_in_turn(parts[1:], text)


def _spelled(part: Exactly | Verbatim) -> str:
    return part.text if isinstance(part, Verbatim) else part.text.replace(" ", "").replace("#", "0")
