"""A JSON text that grows, read as values of which some have not ended."""

import json
import re
from typing import Any, Literal

Kind = Literal["null", "boolean", "number", "string", "array", "object"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = re.compile(r"[ \t\r\n]*")
_DIGITS = re.compile(r"[0-9+\-.eE]+")
_LETTERS = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGUN = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:(?:\.[0-9]+)?(?:[eE](?:[+-]?[0-9]*))?|\.))?"
)  # a number, or its beginning
_SHORT_ESCAPES = '"\\/bfnrt'
_LITERALS: dict[str, tuple[Kind, str]] = {
    "t": ("boolean", "true"),
    "f": ("boolean", "false"),
    "n": ("null", "null"),
}
_CLOSING = {"object": "}", "array": "]"}


class NotJson(ValueError):
    """No JSON text begins like this, or a name comes twice in an object."""


class Value:
    """A value, whole (`done`) or begun.

    `text` is a string's content, and what is written of a number or a literal. `name` is the name of a member
    that is being written, `named` whether the name itself is whole.
    """

    __slots__ = ("done", "items", "kind", "known", "members", "name", "named", "text")

    def __init__(self, kind: Kind, text: str = "", *, done: bool = False) -> None:
        self.kind = kind
        self.text = text
        self.done = done
        self.members: dict[str, Value] = {}
        self.items: list[Value] = []
        self.name: str | None = None
        self.named = False
        self.known: dict[Any, Any] = {}  # what others have found out about the value as it is

    def copy(self) -> "Value":
        """A copy that grows on its own; whole values within are shared."""
        other = Value(self.kind, self.text, done=self.done)
        other.members, other.items = self.members.copy(), self.items.copy()
        other.name, other.named = self.name, self.named
        return other

    @property
    def begun_name(self) -> str | None:
        """The name of a member of which no value has begun."""
        return None if self.done or self.name is None or self.name in self.members else self.name

    def loaded(self) -> Any:
        """The whole value as Python has it."""
        match self.kind:
            case "object":
                return {name: one.loaded() for name, one in self.members.items()}
            case "array":
                return [one.loaded() for one in self.items]
            case "string":
                return self.text
        return json.loads(self.text)


class Text:
    """The values of a text that grows. `stack` are the begun ones, outermost first; `at` says what may
    follow; `escape` is a begun escape in a string."""

    def __init__(self, text: str = "") -> None:
        self.root: Value | None = None
        self.stack: list[Value] = []
        self.at = "value"
        self.escape = ""
        self.feed(text)

    def fork(self) -> "Text":
        """The same text, which grows on its own."""
        other = Text()
        other.at, other.escape, other.root = self.at, self.escape, self.root
        other.stack = [one.copy() for one in self.stack]
        if other.stack:
            other.root = other.stack[0]
        for above, value in zip(other.stack, other.stack[1:], strict=False):
            if above.kind == "object":
                assert above.name is not None
                above.members[above.name] = value
            else:
                above.items[-1] = value
        return other

    def feed(self, text: str) -> "Text":
        """Add to the text. Raises NotJson."""
        for one in self.stack:
            one.known = {}
        place = 0
        while place < len(text):
            place = self._string(text, place) if self.at in ("string", "name") else self._other(text, place)
        return self

    def end(self) -> Value | None:
        """The value of the text, which ends here; None if that is not whole."""
        if len(self.stack) == 1:
            self.end_number()
        return self.root if self.at == "end" else None

    def end_number(self) -> None:
        """End a number that is being written, if it may end here."""
        if self.at == "number" and _NUMBER.fullmatch(self.stack[-1].text):
            self.feed(" ")

    def _string(self, text: str, place: int) -> int:
        if self.escape:
            self.escape += text[place]
            short = len(self.escape) == 2 and self.escape[1] in _SHORT_ESCAPES
            if not short and self.escape[1] != "u":
                raise NotJson("an unknown escape")
            if short or len(self.escape) == 6:
                try:
                    self._put(json.loads(f'"{self.escape}"'))
                except ValueError:
                    raise NotJson("an unknown escape") from None
                self.escape = ""
            return place + 1
        if found := _PLAIN.match(text, place):
            self._put(found[0])
            return found.end()
        if text[place] == "\\":
            self.escape = "\\"
        elif text[place] != '"':
            raise NotJson("a control character in a string")
        elif self.at == "string":
            self._close()
        else:
            value = self.stack[-1]
            if value.name in value.members:
                raise NotJson("a name comes twice")
            value.named, self.at = True, "colon"
        return place + 1

    def _put(self, text: str) -> None:
        value = self.stack[-1]
        if self.at == "string":
            value.text += text
        else:
            value.name = (value.name or "") + text

    def _other(self, text: str, place: int) -> int:
        if self.at in ("number", "literal"):
            return self._scalar(text, place)
        blanks = _BLANKS.match(text, place)
        assert blanks is not None
        if blanks.end() == len(text):
            return blanks.end()
        place = blanks.end()
        self._sign(text[place])
        return place if self.at in ("number", "literal") else place + 1

    def _scalar(self, text: str, place: int) -> int:
        value = self.stack[-1]
        found = (_DIGITS if self.at == "number" else _LETTERS).match(text, place)
        if found:
            value.text += found[0]
        if self.at == "literal":
            whole = _LITERALS[value.text[:1]][1]
            if found is None or not whole.startswith(value.text):
                raise NotJson("an unknown literal")
            if value.text == whole:
                self._close()
            return found.end()
        end = found.end() if found else place
        if not (_BEGUN if end == len(text) else _NUMBER).fullmatch(value.text):
            raise NotJson("not a number")
        if end < len(text):
            self._close()
        return end

    def _sign(self, sign: str) -> None:
        above = self.stack[-1] if self.stack else None
        match self.at:
            case "after" if above is not None and sign == ",":
                self.at = "next name" if above.kind == "object" else "value"
            case "after" | "first name" | "first" if above is not None and sign == _CLOSING[above.kind]:
                self._close()
            case "colon" if sign == ":":
                self.at = "value"
            case "first name" | "next name" if above is not None and sign == '"':
                above.name, above.named, self.at = "", False, "name"
            case "value" | "first":
                self._open(sign)
            case _:
                raise NotJson("it is not allowed here")

    def _open(self, sign: str) -> None:
        match sign:
            case "{":
                self._push(Value("object"), "first name")
            case "[":
                self._push(Value("array"), "first")
            case '"':
                self._push(Value("string"), "string")
            case "t" | "f" | "n":
                self._push(Value(_LITERALS[sign][0]), "literal")
            case _ if sign in "-0123456789":
                self._push(Value("number"), "number")
            case _:
                raise NotJson("no value begins like this")

    def _push(self, value: Value, at: str) -> None:
        if not self.stack:
            self.root = value
        elif self.stack[-1].kind == "array":
            self.stack[-1].items.append(value)
        else:
            name = self.stack[-1].name
            assert name is not None
            self.stack[-1].members[name] = value
        self.stack.append(value)
        self.at = at

    def _close(self) -> None:
        value = self.stack.pop()
        value.done, value.known = True, {}
        self.at = "after" if self.stack else "end"
        if self.stack:
            self.stack[-1].name, self.stack[-1].named = None, False
