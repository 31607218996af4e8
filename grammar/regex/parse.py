"""Parses regular expressions as ECMA-262 reads them, with the leniency of browsers (annex B)."""

from dataclasses import dataclass
from functools import lru_cache

from personae.grammar.regex import charset
from personae.grammar.regex.charset import Ranges

_MOST_REPEATED = 1_000_000
_DEPTH = 100
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_CLASSES = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.SPACE}
_LONG_CATEGORIES = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Number": "N", "Decimal_Number": "Nd",
    "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Other": "C", "Control": "Cc",
}  # fmt: skip


class NotRegular(ValueError):
    """An expression that is malformed, or whose language is not known to be regular."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any of them."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; None is any number."""

    node: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """What follows (or has gone before) matches, or does not."""

    node: "Node"
    ahead: bool
    negative: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """ "^", "$", "b" or "B"."""

    sign: str


Node = Chars | Sequence | Alternation | Repeat | Look | Edge


@lru_cache(1024)
def parse(pattern: str) -> Node:
    """Raises NotRegular."""
    parser = _Parser(pattern)
    node = parser.choice(0)
    if parser.place < len(pattern):
        raise NotRegular("a closing parenthesis has no opening one")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0

    def choice(self, depth: int) -> Node:
        if depth > _DEPTH:
            raise NotRegular("it is nested too deeply")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._next not in ("", "|", ")"):
            parts.append(self._quantified(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    @property
    def _next(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.place):
            self.place += len(text)
            return True
        return False

    def _quantified(self, node: Node) -> Node:
        found = self._quantifier()
        if found is None:
            return node
        self._take("?")  # a lazy quantifier finds the same texts
        least, most = found
        if most is not None and least > most:
            raise NotRegular("the numbers of a quantifier are out of order")
        if max(least, most or 0) > _MOST_REPEATED:
            raise NotRegular("a quantifier is too large")
        if self._next in ("*", "+", "?") and self._next:
            raise NotRegular("there is nothing to repeat")
        return Repeat(node, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return found
        if self._next != "{":
            return None
        end = self.pattern.find("}", self.place)
        least, comma, most = self.pattern[self.place + 1 : max(end, self.place + 1)].partition(",")
        digits = least.isascii() and least.isdigit() and (not most or (most.isascii() and most.isdigit()))
        if end < 0 or not digits or len(least) > 9 or len(most) > 9:
            return None  # a brace like any other character
        self.place = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self, depth: int) -> Node:
        sign = self._next
        self.place += 1
        match sign:
            case "^" | "$":
                return Edge(sign)
            case "(":
                return self._group(depth)
            case ".":
                return Chars(charset.opposite(charset.LINE_END))
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise NotRegular("there is nothing to repeat")
        return _one(ord(sign))

    def _group(self, depth: int) -> Node:
        look = None
        if self._take("?"):
            for sign, kind in (
                ("=", (True, False)),
                ("!", (True, True)),
                ("<=", (False, False)),
                ("<!", (False, True)),
            ):
                if self._take(sign):
                    look = kind
                    break
            else:
                if self._take("<"):
                    end = self.pattern.find(">", self.place)
                    if end < 0 or not self.pattern[self.place : end].replace("$", "_").isidentifier():
                        raise NotRegular("a group has no name")
                    self.place = end + 1
                elif not self._take(":"):
                    raise NotRegular("a group begins in an unknown way")
        node = self.choice(depth + 1)
        if not self._take(")"):
            raise NotRegular("a parenthesis is not closed")
        return Look(node, *look) if look else node

    def _escape(self) -> Node:
        sign = self._next
        if sign in ("b", "B"):
            self.place += 1
            return Edge(sign)
        if sign in "123456789" and sign:
            raise NotRegular("back-references are not regular")
        if sign == "k":
            raise NotRegular("back-references are not regular")
        return Chars(self._escaped())

    def _escaped(self) -> Ranges:
        """The meaning of an escape, inside or outside a class."""
        sign = self._next
        self.place += 1
        if not sign:
            raise NotRegular("it ends with a backslash")
        if sign.lower() in _CLASSES:
            ranges = _CLASSES[sign.lower()]
            return ranges if sign.islower() else charset.opposite(ranges)
        if sign in ("p", "P"):
            ranges = self._property()
            return ranges if sign == "p" else charset.opposite(ranges)
        if sign in _CONTROLS:
            return _point(_CONTROLS[sign])
        if sign == "c" and self._next.isascii() and self._next.isalpha():
            self.place += 1
            return _point(ord(self.pattern[self.place - 1]) % 32)
        if sign == "0":
            if self._next.isdigit():
                raise NotRegular("an octal escape")
            return _point(0)
        if sign == "x":
            return _point(self._hexadecimal(2))
        if sign == "u":
            return _point(self._unicode())
        if sign.isascii() and sign.isalnum():
            raise NotRegular(f"\\{sign} is not known")
        return _point(ord(sign))

    def _property(self) -> Ranges:
        end = self.pattern.find("}", self.place)
        if self._next != "{" or end < 0:
            raise NotRegular("a property has no name")
        name = self.pattern[self.place + 1 : end]
        self.place = end + 1
        name = name.removeprefix("gc=").removeprefix("General_Category=")
        if name == "Any":
            return charset.ALL
        if name == "ASCII":
            return ((0, 0x7F),)
        try:
            return charset.category(_LONG_CATEGORIES.get(name, name))
        except KeyError:
            raise NotRegular(f"the property {name} is not known") from None

    def _unicode(self) -> int:
        if self._take("{"):
            end = self.pattern.find("}", self.place)
            digits = self.pattern[self.place : max(end, self.place)]
            if not digits or len(digits) > 6:
                raise NotRegular("an escape has no number")
            self.place = end + 1
            return _hexadecimal(digits)
        point = self._hexadecimal(4)
        if 0xD800 <= point < 0xDC00 and self._take("\\u"):
            low = self._hexadecimal(4)
            if not 0xDC00 <= low < 0xE000:
                raise NotRegular("half a character")
            return 0x10000 + (point - 0xD800) * 0x400 + low - 0xDC00
        return point

    def _hexadecimal(self, count: int) -> int:
        digits = self.pattern[self.place : self.place + count]
        if len(digits) < count:
            raise NotRegular("an escape has too few digits")
        self.place += count
        return _hexadecimal(digits)

    def _class(self) -> Node:
        negative = self._take("^")
        parts: list[Ranges] = []
        while not self._take("]"):
            if not self._next:
                raise NotRegular("a class is not closed")
            low = self._member()
            if self._next == "-" and self.pattern[self.place + 1 : self.place + 2] not in ("]", ""):
                self.place += 1
                high = self._member()
                if _single(low) and _single(high):
                    if low[0][0] > high[0][0]:
                        raise NotRegular("a range is out of order")
                    parts.append(charset.union([((low[0][0], high[0][0]),)]))
                    continue
                parts += [low, _point(ord("-")), high]  # annex B: no range
            else:
                parts.append(low)
        ranges = charset.union(parts)
        return Chars(charset.opposite(ranges) if negative else ranges)

    def _member(self) -> Ranges:
        sign = self._next
        self.place += 1
        if sign != "\\":
            return _point(ord(sign))
        if self._take("b"):
            return _point(8)
        if self._next == "-":
            self.place += 1
            return _point(ord("-"))
        return self._escaped()


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _hexadecimal(digits: str) -> int:
    try:
        point = int(digits, 16)
    except ValueError:
        raise NotRegular("an escape has no number") from None
    if not digits.isalnum() or point > 0x10FFFF:
        raise NotRegular("an escape has no number")
    return point


def _point(point: int) -> Ranges:
    if 0xD800 <= point < 0xE000:
        raise NotRegular("half a character")
    return ((point, point),)


def _one(point: int) -> Chars:
    return Chars(_point(point))
