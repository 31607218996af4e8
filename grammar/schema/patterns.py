"""Regular expressions for what JSON Schema says of strings by other means.

They are built from literals, classes and groups alone, which ECMA-262, Python and Rust read the same way.
"""

import re
from collections.abc import Iterable
from itertools import groupby

ANY = r"[\s\S]"
_CLASS = re.compile(r"\[(\^?)((?:[^\]\\\[]|\\.)+)\]")


def any_of_length(minimum: int, maximum: int | None) -> str:
    """The strings of `minimum` to `maximum` characters."""
    return f"^{ANY}{{{minimum},{'' if maximum is None else maximum}}}$"


def anything_but(words: Iterable[str]) -> str:
    """The strings that are none of `words`."""
    return f"^(?:{_differs(sorted(set(words)))})$"


def _differs(words: list[str]) -> str:
    """What may follow where `words` (sorted, without repetition) are what must not."""
    alternatives = [] if "" in words else [""]
    firsts = []
    for first, group in groupby((word for word in words if word), key=lambda word: word[0]):
        firsts.append(re.escape(first) if first != "^" else r"\^")
        rest = _differs([word[1:] for word in group])
        alternatives.append(f"{re.escape(first)}(?:{rest})")
    other = f"[^{''.join(firsts)}]" if firsts else ANY
    alternatives.append(f"{other}{ANY}*")
    return "|".join(alternatives)


def complement(pattern: str) -> str | None:
    """A pattern that matches the strings that `pattern` does not, where there is a simple one; else None.

    Known are a single class that may occur anywhere, as in [^a-z], and one that all characters are of, as in
    ^[a-z]*$ and ^[a-z]+$.
    """
    if found := _CLASS.fullmatch(pattern):
        return f"^{_opposite(*found.groups())}*$"
    if (found := _CLASS.fullmatch(pattern[1:-2])) and pattern[0] == "^" and pattern[-2:] in ("*$", "+$"):
        outside = _opposite(*found.groups())
        return outside if pattern[-2] == "*" else f"^$|{outside}"
    return None


def _opposite(caret: str, members: str) -> str:
    return f"[{members}]" if caret else f"[^{members}]"
