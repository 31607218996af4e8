"""Reads an answer as it arrives, and separates reasoning, text for the reader, and tool calls.

`AnswerParser` is total: no text makes it fail, and anything that is not a well-formed call is text. It is
incremental: the pieces that it returns add up to the same result, however the input is divided. It is linear:
it looks at each character a bounded number of times.

It is written as a generator that runs until it needs more text, so that it reads like a parser of a whole
text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from personae.grammar.reasoning.format import ReasoningFormat, Thinks
from personae.grammar.structure.call_arguments import ArgumentTexts, read_json, read_keyed
from personae.grammar.structure.marks import Marks
from personae.grammar.structure.reader import BLANKS, Reader, Steps, Trimmed
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.function import NAME, Function

_NAME = re.compile(NAME)
_LONGEST_HEADER = 256  # of a message; channels, recipients and types of content are shorter


@dataclass(slots=True)
class CallPiece:
    """What a tool call gained. When it begins, its name, and the number that the model gave it if its format
    has one; then JSON text of its arguments."""

    index: int
    name: str | None
    arguments: str = ""
    number: str = ""


@dataclass(slots=True)
class TextPiece:
    """Text for the reader, or reasoning."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class ParsedPieces:
    """What an answer gained, in order. Pieces can be added."""

    pieces: list[TextPiece | CallPiece] = field(default_factory=list)

    def say(self, text: str, *, reasoning: bool = False) -> None:
        """The answer gained text."""
        if text:
            self.pieces.append(TextPiece(text, reasoning))

    def extend(self, index: int, arguments: str) -> None:
        """A call gained a part of its arguments."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, CallPiece) and last.index == index:
            last.arguments += arguments
        else:
            self.pieces.append(CallPiece(index, None, arguments))


class AnswerParser(Reader):
    """Pass the text of one answer to `push`, with `marks` for special tokens, and call `finish` at its end.

    Reasoning comes first, as `thinks` says. `thinking` says whether it has begun and not ended. Tool calls
    are looked for in the text after it: anywhere, or only at its beginning. If `tools` is None, there are
    none. `functions` are the functions that may be called, by name; what has another name is text. Without
    functions, any name is one.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        reasoning: ReasoningFormat | None,
        thinks: Thinks,
        tools: ToolFormat | None,
        anywhere: bool,
        functions: Mapping[str, Function] | None = None,
        shown: bool = False,
    ) -> None:
        super().__init__()
        self.marks = marks
        self.begun = 0
        self.completed = 0
        self.thinking = False
        self._said = ParsedPieces()
        self._shown = shown
        self._functions = functions or {}
        self._content = Trimmed()
        self._called = False  # and nothing but blanks since then
        self._reasoning = Trimmed(leading=thinks is not Thinks.WITHIN)
        self._openers = self._texts_that_open(reasoning, tools)
        self._steps = self._answer(reasoning, thinks, tools, anywhere)
        next(self._steps)

    def push(self, text: str) -> ParsedPieces:
        """What the next piece of the answer adds."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._run()

    def finish(self) -> ParsedPieces:
        """End the answer. Returns what was held back."""
        self._ended = True
        return self._run()

    def _run(self) -> ParsedPieces:
        next(self._steps, None)
        said, self._said = self._said, ParsedPieces()
        return said

    def _answer(
        self, reasoning: ReasoningFormat | None, thinks: Thinks, tools: ToolFormat | None, anywhere: bool
    ) -> Steps[None]:
        if reasoning is not None and thinks is not Thinks.NO:
            yield from self._thoughts(reasoning, thinks.inside)
        while (yield from self.more()):
            if tools is None:
                yield from self._rest(reasoning)
            elif way := (yield from self._finds(tools, reasoning, anywhere and tools.anywhere)):
                yield from self._calls(way)
        if self._called:
            self._content.drop()
        self._said.say(self.marks.restore(self._content.rest(), shown=self._shown))

    def _thoughts(self, reasoning: ReasoningFormat, opened: bool) -> Steps[None]:
        """Reasoning, and text for the reader that a format puts before the answer itself."""
        put = self.marks.put
        open, close, joint, aside = map(
            put, (reasoning.open, reasoning.close, reasoning.joint, reasoning.aside)
        )
        while True:
            opener = open if opened else (yield from self._opener(reasoning, (open, aside)))
            if opener == open:
                self.thinking = True
                yield from self.until(close, self._reason)
                self.thinking = False
                self._reason("\n")
                self._content.leading = True
            elif opener:
                yield from self.until(close, self._write)
                self._write("\n")
            else:
                return
            if not joint:
                return
            opened = False
            yield from self.opens(" " + joint)

    def _opener(self, reasoning: ReasoningFormat, openers: tuple[str, ...]) -> Steps[str]:
        """Pass what opens a message, in any way, if it is one of `openers`. Returns this one; "" if none
        is there."""
        for opener in filter(None, openers):
            if (yield from self.opens(" " + opener)):
                return opener
        if reasoning.header is None:
            return ""
        words = yield from self._header(*map(self.marks.put, reasoning.header))
        opener = "" if words is None else self.marks.put(reasoning.channel(words))
        if opener in openers:
            return opener
        self.unread()
        return ""

    def _header(self, begin: str, end: str) -> Steps[str | None]:
        """Pass any header of a message. Returns its words, a recipient last; "" if the answer ends within it;
        None if there is none."""
        self._raw = []
        recipient = ""
        yield from self.take(" ")
        if (yield from self.peek()) == "t":
            recipient = yield from self.characters(
                lambda char: char not in begin[0] + BLANKS, _LONGEST_HEADER
            )
            if not recipient.startswith("to="):
                return None
            yield from self.take(" ")
        if not (yield from self.take(begin)):
            return None
        words = ""
        while not words.endswith(end):
            if len(words) == _LONGEST_HEADER:
                return None
            if not (yield from self.more()):
                return ""
            words += yield from self.characters(lambda char: True, 1)
        return f"{words.removesuffix(end)} {recipient}"

    def _rest(self, reasoning: ReasoningFormat | None) -> Steps[None]:
        """The remaining text, up to the end of the answer or as far as it has arrived."""
        text = "" if reasoning is None else reasoning.text
        if (
            reasoning is not None
            and text
            and not (yield from self._opener(reasoning, (self.marks.put(text),)))
        ):
            yield from self._drop_begun()
        while (yield from self.more()):
            self._write_all()

    def _texts_that_open(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> list[str]:
        """How messages may begin, if the model writes several."""
        if reasoning is None or not reasoning.text:
            return []
        texts = [reasoning.text, reasoning.open, reasoning.aside, reasoning.joint]
        texts += [way.open + way.before_name for way in (tools.ways if tools is not None else ())]
        return [self.marks.put(text) for text in texts if text]

    def _drop_begun(self) -> Steps[None]:
        """Skip a text that opens a message, if the answer ends in the middle of it."""
        most = max(map(len, self._openers))
        while not self._ended and len(self._text) - self._at < most:
            if not self._is_begun():
                return
            yield
        if self._ended and self._is_begun():
            self._at = len(self._text)

    def _is_begun(self) -> bool:
        rest = self._text[self._at :].lstrip()
        return any(opener.startswith(rest) for opener in self._openers)

    def _finds(
        self, tools: ToolFormat, reasoning: ReasoningFormat | None, anywhere: bool
    ) -> Steps[ToolFormat | None]:
        """Text up to and including a trigger; then the way in which calls are written, or None at the end."""
        if anywhere:
            return tools if (yield from self.until(self.marks.put(tools.trigger), self._write)) else None
        for way in tools.ways:
            if (yield from self.opens(" " + self.marks.put(way.trigger))):
                return way
        yield from self._rest(reasoning)
        return None

    def _calls(self, tools: ToolFormat) -> Steps[None]:
        """Calls, after their trigger. What is not a call is text, unless the answer ends within it."""
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
            if tools.single or (not close and following.startswith(trigger)):
                return
            passed = yield from self.either(following, close)
            if close and passed == close:
                return
            if passed is None:
                break
        if not self._ended or self._at < len(self._text):
            if self.begun == begun:
                self._write(trigger)
            self.unread()

    def _call(self, tools: ToolFormat, head: str) -> Steps[bool]:
        """One call; False if it is not complete."""
        put = self.marks.put
        self.number = ""
        if not (yield from self.take(head)):
            return False
        name = yield from self.characters(_NAME.match)
        if not name or (self._functions and name not in self._functions):
            return False
        if not (yield from self.take(put(tools.after_name))):
            return False
        style = tools.arguments
        if not isinstance(style, KeyedArguments) and (yield from self.peek()) != "{":
            return False
        index, self.begun = self.begun, self.begun + 1
        self._content.drop()
        self._said.pieces.append(CallPiece(index, name, number=self.number))
        self._raw = []

        def emit(text: str) -> None:
            self._said.extend(index, text)

        if isinstance(style, KeyedArguments):
            texts = ArgumentTexts(put, lambda text: self.marks.restore(text, shown=False), emit)
            function = self._functions.get(name)
            complete = yield from read_keyed(self, style, function, tools.after_arguments, texts)
        else:
            complete = yield from read_json(self, emit)
            complete = complete and (yield from self.take(put(tools.after_arguments)))
        self.completed += complete
        self._called = True
        return complete

    def _write_all(self) -> None:
        self._write(self._text[self._at :])
        self._at = len(self._text)

    def _write(self, text: str) -> None:
        self._called = self._called and not text.strip()
        self._said.say(self.marks.restore(self._content.push(text), shown=self._shown))

    def _reason(self, text: str) -> None:
        said = self.marks.restore(self._reasoning.push(text), shown=self._shown)
        self._said.say(said, reasoning=True)
