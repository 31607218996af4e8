"""Reads an answer as it comes: what of it is reasoning, what is text for the reader, what are tool calls.

`AnswerParser` is total: no text makes it fail, and what is no well-formed call is text. It is incremental:
the pieces that it returns add up to the same, whatever the pieces that it is given. It is linear: it looks at
each character a bounded number of times.

It is written as a generator that runs until it needs more text, so that it reads like a parser of a whole
text.
"""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import takewhile

from personae.grammar.reasoning.format import ReasoningFormat, Thinks
from personae.grammar.structure.marks import Marks
from personae.grammar.tools.format import NAME, ToolFormat

_BLANKS = " \t\r\n"
_NAME = re.compile(NAME)
_MARK = "\ud800-\udfff"  # no text has these; see marks.py
_JSON = re.compile(rf'["{{}}\[\]{_MARK}]')
_IN_STRING = re.compile(rf'["\\{_MARK}]')


@dataclass(slots=True)
class CallPiece:
    """What a tool call gained: its name, once, when it begins; then JSON text of its arguments."""

    index: int
    name: str | None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What an answer gained. Pieces add up."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


Steps = Generator[None, None, None]


class AnswerParser:
    """`push` the text of one answer, with `marks` for special tokens, and `finish` at its end.

    Reasoning comes first, as `thinks` says. Tool calls are looked for in the text after it: anywhere, or only
    at its beginning. `tools` None: there are none.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        reasoning: ReasoningFormat | None,
        thinks: Thinks,
        tools: ToolFormat | None,
        anywhere: bool,
        shown: bool = False,
    ) -> None:
        self.marks = marks
        self.begun = 0
        self.completed = 0
        self._said = Said()
        self._text = ""
        self._at = 0
        self._ended = False
        self._shown = shown
        self._raw: list[str] = []  # what was passed, for the case that it has to be read again
        self._content = _Trimmed()
        self._reasoning = _Trimmed(leading=True)
        self._steps = self._answer(reasoning, thinks, tools, anywhere)
        next(self._steps)

    def push(self, text: str) -> Said:
        """What the next piece of the answer adds."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._run()

    def finish(self) -> Said:
        """The answer ends here: what was held back."""
        self._ended = True
        return self._run()

    def _run(self) -> Said:
        next(self._steps, None)
        said, self._said = self._said, Said()
        return said

    def _answer(
        self, reasoning: ReasoningFormat | None, thinks: Thinks, tools: ToolFormat | None, anywhere: bool
    ) -> Steps:
        if reasoning is not None and thinks is not Thinks.NO:
            opened = thinks is Thinks.OPEN or (yield from self._opens(self.marks.put(reasoning.open)))
            if opened:
                yield from self._until(self.marks.put(reasoning.close), self._reason)
                self._content.leading = True
        while (yield from self._more()):
            if tools is None:
                self._write_all()
            elif (yield from self._finds(tools, anywhere and tools.anywhere)):
                yield from self._calls(tools)
        self._said.content += self.marks.restore(self._content.rest(), shown=self._shown)

    def _finds(self, tools: ToolFormat, anywhere: bool) -> Generator[None, None, bool]:
        """Text up to the trigger, and that; False at the end of the answer."""
        trigger = self.marks.put(tools.trigger)
        if anywhere:
            return (yield from self._until(trigger, self._write))
        if (yield from self._opens(trigger)):
            return True
        while (yield from self._more()):
            self._write_all()
        return False

    def _calls(self, tools: ToolFormat) -> Steps:
        """Calls, after their trigger. What is none is text, unless the answer ends within it."""
        put = self.marks.put
        trigger = put(tools.trigger)
        head = put(tools.open + tools.before_name).removeprefix(trigger)
        following = put(tools.between + tools.before_name).lstrip(" ")
        close = put(tools.close).lstrip(" ")
        self._raw = []
        begun = self.begun
        while (yield from self._call(tools, head)):
            head = ""
            self._raw = []
            if not close and following.startswith(trigger):
                return
            passed = yield from self._either(following, close)
            if passed == close:
                return
            if passed is None:
                break
        if not self._ended or self._at < len(self._text):
            if self.begun == begun:
                self._write(trigger)
            self._unread()

    def _call(self, tools: ToolFormat, head: str) -> Generator[None, None, bool]:
        """One call; False if it is not complete."""
        put = self.marks.put
        if not (yield from self._take(head)):
            return False
        name = yield from self._name()
        if not name or not (yield from self._take(put(tools.after_name))):
            return False
        if not (yield from self._more()) or self._text[self._at] != "{":
            return False
        index, self.begun = self.begun, self.begun + 1
        self._content.drop()
        self._said.calls.append(CallPiece(index, name))
        self._raw = []
        if (yield from self._object(index)) and (yield from self._take(put(tools.after_arguments))):
            self.completed += 1
            return True
        return False

    def _object(self, index: int) -> Generator[None, None, bool]:
        """The arguments: a JSON object, passed on as it comes; False if it does not end."""
        scanner = _ObjectScanner()
        while not scanner.ended and (yield from self._more()):
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                _extend(self._said.calls, index, self._text[self._at : end])
            self._at = end
        return scanner.complete

    def _more(self) -> Generator[None, None, bool]:
        """Wait for a character; False when none will come."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _until(self, tag: str, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        """Emit text up to `tag` and pass that; False when the answer ends before."""
        while (yield from self._more()):
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

    def _opens(self, tag: str) -> Generator[None, None, bool]:
        """Pass blanks and `tag`; nothing if they are not there."""
        self._raw = []
        if (yield from self._take(" " + tag)):
            return True
        self._unread()
        return False

    def _either(self, first: str, second: str) -> Generator[None, None, str | None]:
        """Pass blanks and one of two texts; None if neither is there."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        shared = "".join(char for char, _ in same)
        if (yield from self._take(" " + shared)) and (yield from self._more()):
            for text in (first, second):
                if text[len(shared) :].startswith(self._text[self._at]):
                    return text if (yield from self._take(text[len(shared) :])) else None
        return None

    def _take(self, fixed: str) -> Generator[None, None, bool]:
        """Pass a fixed text, whose spaces are any blanks or none; False where it differs."""
        for char in fixed:
            if char == " ":
                while (yield from self._more()) and self._text[self._at] in _BLANKS:
                    self._pass()
            elif not (yield from self._more()) or self._text[self._at] != char:
                return False
            else:
                self._pass()
        return True

    def _name(self) -> Generator[None, None, str]:
        name = []
        while (yield from self._more()) and _NAME.match(self._text[self._at]):
            name.append(self._text[self._at])
            self._pass()
        return "".join(name)

    def _pass(self) -> None:
        self._raw.append(self._text[self._at])
        self._at += 1

    def _unread(self) -> None:
        """Go back to where what was passed began."""
        self._text = "".join(self._raw) + self._text[self._at :]
        self._at = 0
        self._raw = []

    def _write_all(self) -> None:
        self._write(self._text[self._at :])
        self._at = len(self._text)

    def _write(self, text: str) -> None:
        self._said.content += self.marks.restore(self._content.push(text), shown=self._shown)

    def _reason(self, text: str) -> None:
        self._said.reasoning += self.marks.restore(self._reasoning.push(text), shown=self._shown)


def _extend(calls: list[CallPiece], index: int, arguments: str) -> None:
    if calls and calls[-1].index == index:
        calls[-1].arguments += arguments
    else:
        calls.append(CallPiece(index, None, arguments))


def _begun(tag: str, text: str, start: int) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    longest = min(len(tag) - 1, len(text) - start)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)


class _Trimmed:
    """Passes text on, but holds back blanks at its end until something follows them.

    `leading`: blanks at its beginning are dropped.
    """

    def __init__(self, *, leading: bool = False) -> None:
        self.leading = leading
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that something has followed."""
        if self.leading:
            text = text.lstrip(_BLANKS)
            self.leading = not text
        kept = text.rstrip(_BLANKS)
        if not kept:
            self._held.append(text)
            return ""
        self._held.append(kept)
        ready = self.rest()
        self._held.append(text[len(kept) :])
        return ready

    def rest(self) -> str:
        """What is held back, now passed on."""
        held = "".join(self._held)
        self._held = []
        return held

    def drop(self) -> None:
        """Forget what is held back."""
        self._held = []


class _ObjectScanner:
    """Finds the end of a JSON object that comes in pieces. A special token within it breaks it off."""

    def __init__(self) -> None:
        self.ended = False
        self.complete = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Look at `text` from `at`; where the object ends in it, or its length."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._quoted else _JSON).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            char = found[0]
            if char == '"':
                self._quoted = not self._quoted
            elif char == "\\":
                self._escaped = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = self.complete = True
                    return at
            else:
                self.ended = True
                return at - 1
        return len(text)
