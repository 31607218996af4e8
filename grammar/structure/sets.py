"""Finds where JSON is in a structure, so that a matcher can read along and see the items of sets."""

from personae.grammar.structure.elements import Concat, Element, Exactly, Json, OneOf, Repeat, Until, Verbatim
from personae.grammar.tracked.sets import Places, Thought


def places(element: Element) -> Places | None:
    """None unless the answer is JSON, after nothing but reasoning."""
    parts = element.parts if isinstance(element, Concat) else (element,)
    thought = _thought(parts[0]) if parts else None
    rest = parts if thought is None else parts[1:]
    found: list[tuple[str, object]] = []
    if _read(Concat(rest), "", found) is None or len(found) > 1 or any(text.strip() for text, _ in found):
        return None
    schemas = tuple((before, schema) for before, schema in found if isinstance(schema, dict))
    return Places(schemas, thought)


def _thought(part: Element) -> Thought | None:
    match part:
        case Until(end=end):
            return Thought("", end)
        case Repeat(part=Concat(parts=(Exactly(text=opening), Until(end=end))), least=0, most=1):
            return Thought(opening, end)
    return None


def _read(element: Element, before: str, found: list[tuple[str, object]]) -> str | None:
    """The text before the end of the element, as far as it is known. None if it may be any text."""
    match element:
        case Exactly(text=text) | Verbatim(text=text):
            return before + text
        case Json(schema=schema):
            found.append((before, schema))
            return ""
        case Concat(parts=parts):
            for part in parts:
                behind = _read(part, before, found)
                if behind is None:
                    return None
                before = behind
            return before
        case OneOf(parts=parts):
            ends = {_read(part, before, found) for part in parts}
            return ends.pop() if len(ends) == 1 else None
    return None
