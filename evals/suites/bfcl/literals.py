"""Java and JavaScript values that models write as text, read as the leaderboard reads them.

Its readers are not real parsers: lists are split at every comma, and unrecognised values stay text. Scores
are only comparable if ours do the same, so they do.
"""

import re
from collections.abc import Callable
from typing import Any

from personae.errors import RequestError

_NUMBER = r"-?\d+(\.\d+)?"
_SCIENTIFIC = _NUMBER + r"([eE][+-]?\d+)?"

JAVA = {
    "byte": int,
    "short": int,
    "integer": int,
    "long": int,
    "float": float,
    "double": float,
    "boolean": bool,
    "char": str,
    "String": str,
    "any": str,
    "Array": list,
    "ArrayList": list,
    "Queue": list,
    "Stack": list,
    "Set": set,
    "HashMap": dict,
    "Hashtable": dict,
}
JAVASCRIPT = {
    "String": str,
    "any": str,
    "integer": int,
    "Bigint": int,
    "float": float,
    "Boolean": bool,
    "array": list,
    "dict": dict,
}


def read_java(text: str, kind: str, items: str | None = None) -> Any:
    """The value of a Java expression of a type; the text itself if it is not one. `items`: a list's elements.

    Raises RequestError for types that the leaderboard does not read.
    """
    if kind in ("byte", "short", "integer"):
        return int(text) if re.match(r"-?\d+$", text) else text
    if kind == "long":
        return int(text[:-1]) if re.match(r"-?\d+[lL]$", text) else text
    if kind == "float":
        return float(text.rstrip("fF")) if re.match(_SCIENTIFIC + r"[fF]$", text) else text
    if kind == "double":
        return float(text) if re.match(_SCIENTIFIC + "$", text) else text
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, text)
    if kind == "Array":
        return _java_array(text, items)
    if kind == "ArrayList":
        return _java_list(text, items)
    if kind == "HashMap":
        return _java_map(text)
    if kind in ("char", "String", "any"):
        return text
    raise RequestError(f"The leaderboard reads no Java values of type {kind}.")


def _java_array(text: str, items: str | None) -> Any:
    found = re.search(r"new\s+\w+\[\]\s*\{(.*?)\}", text)
    if found is None:
        return text
    pieces = [piece.strip() for piece in found[1].split(",") if piece.strip()]
    return [read_java(piece, items) if items else _untyped_java(piece) for piece in pieces]


def _java_list(text: str, items: str | None) -> Any:
    def element(piece: str) -> Any:
        if items in ("char", "String"):
            return piece[1:-1]
        return read_java(piece, items) if items else _untyped_java(piece)

    opening = r"new\s+ArrayList<\w*>\("
    if found := re.search(opening + r"Arrays\.asList\((.+?)\)\)", text):
        return [element(piece.strip()) for piece in found[1].split(",")]
    if found := re.search(opening + r"\)\s*\{\{\s*(.+?)\s*\}\}", text, re.DOTALL):
        return [element(piece.strip()) for piece in re.findall(r"add\((.+?)\)", found[1])]
    return [] if re.search(opening + r"\)", text) else text


def _java_map(text: str) -> Any:
    opening = r"new\s+HashMap<.*?>\s*\(\)"
    if found := re.search(opening + r"\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", text, re.DOTALL):
        puts = re.findall(r'put\("(.*?)",\s*(.*?)\)', found[1])
        return {key: _untyped_java(value.strip()) for key, value in puts}
    return {} if re.search(opening, text) else text


def _untyped_java(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    if re.match(r"-?\d+[lL]$", text):
        return int(text[:-1])
    if re.match(_SCIENTIFIC + r"[fF]$", text):
        return float(text[:-1])
    return _number(text)


def read_javascript(text: str, kind: str, items: str | None = None) -> Any:
    """As `read_java`."""
    if kind == "String":
        return text[1:-1] if _quoted(text) else text
    if kind == "integer":
        return int(text) if re.match(r"-?\d+$", text) else text
    if kind == "Bigint":
        return int(text[:-1]) if re.match(r"-?\d+n$", text) else text
    if kind == "float":
        return float(text) if re.match(_NUMBER + "$", text) else text
    if kind == "Boolean":
        return {"true": True, "false": False}.get(text, text)
    if kind == "array":
        return _js_array(text.strip(), items)
    if kind == "dict":
        return _js_object(text.strip())
    if kind == "any":
        return text
    raise RequestError(f"The leaderboard reads no JavaScript values of type {kind}.")


def _js_array(code: str, items: str | None) -> Any:
    rows = r"\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*"
    try:
        if nested := re.match(rf"\[{rows}\]|\bnew\s+Array\({rows}\)", code):
            inner = [row.strip() for row in re.findall(r"\[(.*?)\]", nested[0])]
            inner[0] = inner[0].removeprefix("[")
            return [[_untyped_js(piece) for piece in row.split(",")] for row in inner]
        flat = re.match(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)", code)
        if flat is None:
            return code
        content = (flat[1] if flat[1] is not None else flat[2] or "").strip()
        pieces = [piece.strip() for piece in content.split(",")] if content else []
        return [read_javascript(piece, items) if items else _untyped_js(piece) for piece in pieces]
    except (RequestError, ValueError):
        return code


def _js_object(code: str) -> Any:
    found = re.match(r"\{(.*?)\}", code)
    if found is None:
        return code
    made: dict[str, Any] = {}
    for key, value in re.findall(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)", found[1]):
        value = value.strip()
        if value.startswith("[") and value.endswith("]"):
            read: Any = _js_array(value, None)
        elif value.startswith("{") and value.endswith("}"):
            read = _js_object(value)
        else:
            read = _untyped_js(value.strip("'\""))
        made[key.strip().strip("'\"")] = read
    return made


def _untyped_js(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if _quoted(text) else _number(text)


def _quoted(text: str) -> bool:
    return any(text.startswith(quote) and text.endswith(quote) for quote in "\"'")


def _number(text: str) -> Any:
    readers: tuple[Callable[[str], Any], ...] = (int, float)
    for read in readers:
        try:
            return read(text)
        except ValueError:
            continue
    return text
