"""Reads text that arrives in pieces as if it were complete.

A reader's steps are generators that yield when they need more text. What they pass is kept until its meaning
is certain, and can be read again.
"""

from collections.abc import Callable, Generator
from itertools import takewhile
from typing import TypeVar

BLANKS = " \t\r\n"
T = TypeVar("T")
Steps = Generator[None, None, T]


class Reader:
    """`_text` from `_at` on has arrived and is not read. `_ended`: no more will arrive."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._raw: list[str] = []  # what was passed, in case it has to be read again
        self.number = ""  # the last number that was passed

    def more(self) -> Steps[bool]:
        """Wait for a character. False if none will arrive."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, without passing it; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def until(self, tag: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Emit text up to `tag`, and pass the tag. False if the answer ends before it."""
        while (yield from self.more()):
            found = self._text.find(tag, self._at)
            if found >= 0:
                emit(self._text[self._at : found])
                self._at = found + len(tag)
                return True
            end = len(self._text) - (0 if self._ended else _begun(tag, self._text, self._at))
            emit(self._text[self._at : end])
            self._at = end
            if end < len(self._text):
                yield
        return False

    def scan(self, end_of: Callable[[str, int], int], emit: Callable[[str], None]) -> None:
        """Emit what has arrived, up to the place that `end_of` returns for the text from a place on."""
        end = end_of(self._text, self._at)
        if end > self._at:
            emit(self._text[self._at : end])
        self._at = end

    def opens(self, tag: str) -> Steps[bool]:
        """Pass `tag` if it is there; otherwise nothing."""
        self._raw = []
        if (yield from self.take(tag)):
            return True
        self.unread()
        return False

    def either(self, first: str, second: str) -> Steps[str | None]:
        """Pass blanks and one of two texts. None if neither is there. An empty text counts as there if the
        other is not."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        shared = "".join(char for char, _ in same)
        if (yield from self.take(" " + shared)) and (yield from self.more()):
            for text in (first, second):
                rest = text[len(shared) :]
                if rest and rest.startswith(self._text[self._at]):
                    return text if (yield from self.take(rest)) else None
            return "" if "" in (first, second) else None
        return None

    def take(self, fixed: str) -> Steps[bool]:
        """Pass a fixed text, in which a space stands for any blanks or none, and `#` for a number. False if
        the text differs."""
        for char in fixed:
            if char == " ":
                while (yield from self.more()) and self._text[self._at] in BLANKS:
                    self._pass()
            elif char == "#":
                self.number = yield from self.characters(str.isdecimal, 4)
                if not self.number:
                    return False
            elif not (yield from self.more()) or self._text[self._at] != char:
                return False
            else:
                self._pass()
        return True

    def characters(self, accepts: Callable[[str], object], most: int = 1024) -> Steps[str]:
        """Pass and return the characters that `accepts` accepts."""
        found: list[str] = []
        while len(found) < most and (yield from self.more()) and accepts(self._text[self._at]):
            found.append(self._text[self._at])
            self._pass()
        return "".join(found)

    def _pass(self) -> None:
        self._raw.append(self._text[self._at])
        self._at += 1

    def unread(self) -> None:
        """Go back to the beginning of what was passed."""
        self._text = "".join(self._raw) + self._text[self._at :]
        self._at = 0
        self._raw = []


def _begun(tag: str, text: str, start: int) -> int:
    """The number of characters at the end of `text` that may be the beginning of `tag`."""
    longest = min(len(tag) - 1, len(text) - start)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)


class Trimmed:
    """Passes text on, but holds back blanks at its end until something follows them.

    `leading`: drop blanks at its beginning.
    """

    def __init__(self, *, leading: bool = False) -> None:
        self.leading = leading
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that something has followed."""
        if self.leading:
            text = text.lstrip(BLANKS)
            self.leading = not text
        kept = text.rstrip(BLANKS)
        if not kept:
            self._held.append(text)
            return ""
        self._held.append(kept)
        ready = self.rest()
        self._held.append(text[len(kept) :])
        return ready

    def rest(self) -> str:
        """Pass on what is held back."""
        held = "".join(self._held)
        self._held = []
        return held

    def drop(self) -> None:
        """Forget what is held back."""
        self._held = []
