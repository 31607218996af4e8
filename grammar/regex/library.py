"""Writes expressions of ECMA-262 for the library that validates answers, which reads some parts differently.

It knows neither `[]` and `[^]` nor names in back-references, its words have letters of all languages, and of
the ends of lines its dot leaves out only one.
"""

import re

_ODD = re.compile(r"\\[bBk]|\[\^?\]|\.")
_DOT_FINDS_ALL = re.compile(r"\(\?[a-z]*s[a-z-]*[:)]")
_PIECE = re.compile(
    r"\\k<(?P<back>[^>]*)>|(?P<open>\((?:\?<(?P<name>[A-Za-z_$][\w$]*)>)?(?!\?))|(?P<class>\[\^?)|\\.|.",
    re.DOTALL,
)
_WORD = "[A-Za-z0-9_]"
_WRITTEN = {
    r"\b": f"(?:(?<={_WORD})(?!{_WORD})|(?<!{_WORD})(?={_WORD}))",
    r"\B": f"(?:(?<={_WORD})(?={_WORD})|(?<!{_WORD})(?!{_WORD}))",
}
_DOT = r"[^\n\r\u2028\u2029]"
_EMPTY = {"[": r"[^\s\S]", "[^": r"[\s\S]"}


def library_pattern(pattern: str) -> str:
    """An equal expression that the library reads as ECMA-262 does, as far as the parts above go."""
    if _ODD.search(pattern) is None:
        return pattern
    groups: dict[str, int] = {}
    written: list[str] = []
    pieces = [*_PIECE.finditer(pattern)]
    finds_all = _DOT_FINDS_ALL.search(pattern) is not None
    number = 0
    for piece in pieces:
        if piece["open"]:
            number += 1
            if piece["name"]:
                groups[piece["name"]] = number
    open_class: str | None = None  # how the class begins whose members follow
    first = False  # whether no member has followed
    for piece in pieces:
        text = piece[0]
        if open_class is not None:
            if text == "]":
                written.append(_EMPTY[open_class] if first else "]")
                open_class = None
                continue
            if first:
                written.append(open_class)
            first = False
            written.append(r"\x08" if text == r"\b" else text)
        elif piece["class"]:
            open_class, first = text, True
        elif piece["back"] in groups:
            written.append(f"(?:\\{groups[piece['back']]})")
        elif text == "." and not finds_all:
            written.append(_DOT)
        else:
            written.append(_WRITTEN.get(text, text))
    if open_class is not None and first:
        written.append(open_class)
    return "".join(written)
