"""Shortens expressions that are searched for, where the text may go on after the match, or before it.

What an expression has beyond its shortest match at such an end changes no verdict: `[a-z]{2,6}/?` is found in
the same texts as `[a-z]{2}`. But a grammar would follow all of it in each text.
"""

from personae.grammar.regex.parse import Alternation, Chars, Node, Repeat, Sequence


def shortened(node: Node) -> Node:
    """An expression that is found in the same texts. In `node`, edges are at its ends only, and nothing looks
    around."""
    if isinstance(node, Alternation):
        return Alternation(tuple(map(shortened, node.parts)))
    parts = _cut(_cut(_parts(node), last=True), last=False)
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _parts(node: Node) -> list[Node]:
    return list(node.parts) if isinstance(node, Sequence) else [node]


def _cut(parts: list[Node], *, last: bool) -> list[Node]:
    """`parts` without what need not be matched at the end (or at the beginning, if not `last`)."""
    while parts:
        end, others = (parts[-1], parts[:-1]) if last else (parts[0], parts[1:])
        kept: list[Node]
        match end:
            case _ if _may_be_empty(end):
                parts = others
                continue
            case Sequence():
                kept = _parts(end)
            case Repeat(inner, least) if not isinstance(inner, Chars):
                before: list[Node] = [Repeat(inner, least - 1, least - 1)] if least > 1 else []
                kept = [*before, *_parts(inner)] if last else [*_parts(inner), *before]
            case Repeat(inner, least):
                return _joined(others, [Repeat(inner, least, least) if least > 1 else inner], last=last)
            case Alternation(ways):
                cut = [Sequence(tuple(_cut(_parts(way), last=last))) for way in ways]
                return _joined(others, [Alternation(tuple(cut))], last=last)
            case _:
                return parts
        parts = _joined(others, kept, last=last)
    return parts


def _joined(others: list[Node], end: list[Node], *, last: bool) -> list[Node]:
    return [*others, *end] if last else [*end, *others]


def _may_be_empty(node: Node) -> bool:
    match node:
        case Repeat(inner, least):
            return least == 0 or _may_be_empty(inner)
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(parts):
            return any(map(_may_be_empty, parts))
        case _:
            return False
