"""Finds grammars in GBNF that match no text, without the library: `root ::= root`.

A rule that needs itself in every alternative never ends.
"""

from personae.grammar.gbnf import AnyItem, Group, RuleName, Rules

_ROUNDS = 64  # the library checks longer chains of rules


def matches_nothing(rules: Rules) -> bool:
    """Whether it is certain that no text matches."""
    ending: set[str] = set()
    for _ in range(_ROUNDS):
        more = {name for name, body in rules.items() if name not in ending and _ends(body, ending)}
        if not more:
            return "root" not in ending
        ending |= more
    return False


def _ends(alternatives: list[list[AnyItem]], ending: set[str]) -> bool:
    """Whether some text matches one of them, if only the rules in `ending` match any text."""
    return any(all(_item_ends(item, ending) for item in items) for items in alternatives)


def _item_ends(item: AnyItem, ending: set[str]) -> bool:
    if any(least == 0 for least, _ in item.repeats):
        return True
    if isinstance(item, Group):
        return _ends(item.alternatives, ending)
    return not isinstance(item, RuleName) or item.name in ending
