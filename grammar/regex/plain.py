"""Rewrites expressions without look-around, lazy quantifiers and names, so that Python and Rust read them as
ECMA-262 does."""

import re
from functools import lru_cache
from itertools import takewhile

from personae.grammar.regex import charset
from personae.grammar.regex.automaton import automaton
from personae.grammar.regex.expression import expression
from personae.grammar.regex.open_ends import shortened
from personae.grammar.regex.parse import (
    Alternation,
    Chars,
    Edge,
    Look,
    Node,
    NotRegular,
    Repeat,
    Sequence,
    parse,
)

# Everything that Rust reads differently, or not at all, contains one of these, except that the last two find
# repetitions at an end of the pattern that is open. Most patterns have none.
_ODD = re.compile(
    r"\.|\\[sScbB]|\(\?(?!:)|[*+?}]\?|\[[^\]]*(\[|&&|--|~~)|[$^)].*\^|\$.|^[^^].*[*+?}]|[*+?})]$"
)


_LOOKS = re.compile(r"\(\?<?[=!]|\\[bB]")


def conjuncts(pattern: str) -> tuple[str, ...]:
    """Plain expressions, all of which a text must match to match `pattern`. If the language is not known to
    be regular, the pattern is returned unchanged, and the library reports what it does not support."""
    if _ODD.search(pattern) is None:
        return (pattern,)
    try:
        return _conjuncts(pattern)
    except NotRegular:
        return (pattern,)


def plain(matched: tuple[str, ...], unmatched: tuple[str, ...] = ()) -> str | None:
    """An expression for the texts in which all of `matched` are found and none of `unmatched`. None if there
    are no such texts. Raises NotRegular."""
    found = _plain(matched, unmatched)
    if isinstance(found, NotRegular):
        raise NotRegular(*found.args)
    return found


@lru_cache(1024)
def _plain(matched: tuple[str, ...], unmatched: tuple[str, ...]) -> str | NotRegular | None:
    """As `plain`. Returns the error, so that it is remembered too: what is refused takes longest."""
    try:
        found = automaton(tuple(map(parse, matched)), tuple(map(parse, unmatched)))
        return None if found.empty else f"^(?:{expression(found)})$"
    except NotRegular as error:
        return error.with_traceback(None)


@lru_cache(1024)
def some_text(matched: tuple[str, ...], unmatched: tuple[str, ...] = ()) -> bool:
    """Whether there is a text in which all of `matched` are found and none of `unmatched`. Raises
    NotRegular."""
    return not automaton(tuple(map(parse, matched)), tuple(map(parse, unmatched))).empty


def literal(text: str) -> str:
    """An expression for one text."""
    return "".join(charset.written(((ord(one), ord(one)),)) for one in text)


def looks_around(pattern: str) -> bool:
    """Whether the pattern may test what is around a place in the text."""
    return _LOOKS.search(pattern.replace(r"\\", "")) is not None


def without_looks(pattern: str) -> str:
    """An expression without look-around for the same whole texts. Raises NotRegular, also if there are no
    such texts."""
    found = plain((f"^(?:{pattern})$",))
    if found is None:
        raise NotRegular("no text matches it")
    return found.removeprefix("^(?:").removesuffix(")$")


def complement(pattern: str) -> str | None:
    """An expression for the texts that `pattern` does not match. None if it is not known."""
    try:
        return plain((), (pattern,)) or NOTHING
    except NotRegular:
        return None


NOTHING = r"[^\s\S]"
"""Matches no text."""


@lru_cache(1024)
def _conjuncts(pattern: str) -> tuple[str, ...]:
    return tuple(_split(parse(pattern)))


def _split(node: Node) -> list[str]:
    """What follows the start, and what must not, as separate expressions: each by itself is small."""
    if not isinstance(node, Sequence) or node.parts[:1] != (Edge("^"),):
        return _whole(node)
    looks = list(takewhile(lambda part: isinstance(part, Look) and part.ahead, node.parts[1:]))
    found: list[str] = []
    for look in looks:
        assert isinstance(look, Look)
        inner = _behind_start(look.node)
        found += [_machine((), (inner,))] if look.negative else _split(inner)
    rest = node.parts[1 + len(looks) :]
    return found + (_whole(Sequence((Edge("^"), *rest))) if rest or not found else [])


def _behind_start(node: Node) -> Node:
    parts = node.parts if isinstance(node, Sequence) else (node,)
    return Sequence((Edge("^"), *parts))


def _whole(node: Node) -> list[str]:
    return [written(shortened(node))] if _is_plain(node, first=True, last=True) else [_machine((node,), ())]


def _machine(matched: tuple[Node, ...], unmatched: tuple[Node, ...]) -> str:
    found = automaton(matched, unmatched)
    if found.empty:
        return NOTHING
    return f"^(?:{expression(found)})$"


def _is_plain(node: Node, *, first: bool, last: bool) -> bool:
    """Whether it tests nothing but the characters in turn, the start only at the beginning, and the end only
    at the end."""
    match node:
        case Chars():
            return True
        case Edge(sign):
            return (sign == "^" and first) or (sign == "$" and last)
        case Look():
            return False
        case Repeat(inner):
            return _is_plain(inner, first=False, last=False)
        case Alternation(parts):
            return all(_is_plain(part, first=first, last=last) for part in parts)
        case Sequence(parts):
            ends = len(parts) - 1
            return all(
                _is_plain(part, first=first and not place, last=last and place == ends)
                for place, part in enumerate(parts)
            )


def written(node: Node) -> str:
    """A node that tests nothing around it, as text."""
    match node:
        case Chars(ranges):
            return charset.written(ranges) if ranges else r"[^\s\S]"
        case Edge(sign):
            return sign
        case Sequence(parts):
            return "".join(
                f"(?:{written(part)})" if isinstance(part, Alternation) else written(part) for part in parts
            )
        case Alternation(parts):
            return "|".join(map(written, parts))
        case Repeat(inner, least, most):
            text = written(inner) if isinstance(inner, Chars) else f"(?:{written(inner)})"
            return text + _times(least, most)
        case Look():
            raise NotRegular("it looks around")


def _times(least: int, most: int | None) -> str:
    if (least, most) in _SIGNS:
        return _SIGNS[least, most]
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


_SIGNS: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
