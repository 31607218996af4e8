"""From the tokens of one choice to what its reader gets: plain text, or reasoning, text and tool calls."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Protocol

from personae.api.output_pieces import CallPart, OutputPieces, Span
from personae.engine.stops import StopFinder
from personae.engine.tokens import Detokenizer, Tokenizer
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.parser import CallPiece, ParsedPieces
from personae.grammar.tools.custom import InputReader


@dataclass(frozen=True, slots=True)
class TextStyle:
    """How tokens become text. `stop` strings end the choice and are left out unless `include_stop`."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    stop: tuple[str, ...] = ()


class OutputParser(Protocol):
    """Follows one choice. After `stopped`, the stop string that ended it, is set, nothing follows."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""

    @property
    def called(self) -> bool:
        """Whether tools were called, and every call is complete."""

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has begun and not ended."""

    def push(self, token: int) -> OutputPieces:
        """What the next token adds."""

    def finish(self) -> OutputPieces:
        """The end of the tokens: returns the text that was held back."""


class PlainOutputParser:
    """Treats everything as text."""

    __slots__ = ("_text",)
    called = False
    thinking = False

    def __init__(self, tokenizer: Tokenizer, style: TextStyle, prompt: Sequence[int]) -> None:
        self._text = Detokenizer(
            tokenizer,
            skip_special_tokens=style.skip_special_tokens,
            stop=style.stop,
            include_stop=style.include_stop,
            after=prompt,
        )

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._text.stopped

    def push(self, token: int) -> OutputPieces:
        """What the next token adds."""
        return self.push_all((token,))

    def push_all(self, tokens: Sequence[int]) -> OutputPieces:
        """What the next tokens add."""
        return _pieces_of(self._text.push(tokens))

    def finish(self) -> OutputPieces:
        """The end of the tokens: returns the text that was held back."""
        return _pieces_of(self._text.flush())


def _pieces_of(text: str) -> OutputPieces:
    return OutputPieces([Span(text)] if text else [])


class ShapedOutputParser:
    """Parses an answer of some shape. Stop strings are looked for only in its text, not in reasoning or
    calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: TextStyle,
        prompt: Sequence[int],
        shape: AnswerShape,
        special: Mapping[str, int],
    ) -> None:
        self._text = Detokenizer(tokenizer, skip_special_tokens=style.skip_special_tokens, after=prompt)
        self._parser = shape.parser(special, shown=not style.skip_special_tokens)
        self._stop = StopFinder(style.stop, style.include_stop)
        self._id = shape.tools.id if shape.tools else ""
        self._ids: set[str] = set()
        self._custom = {function.name for function in shape.functions if function.custom}
        self._inputs: dict[int, InputReader] = {}

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._stop.found

    @property
    def called(self) -> bool:
        """Whether tools were called, and every call is complete."""
        return 0 < self._parser.begun == self._parser.completed

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._parser.thinking

    def push(self, token: int) -> OutputPieces:
        """What the next token adds."""
        mark = self._parser.marks.of(token)
        if mark is None:
            return self._pieces(self._parser.push(self._text.push((token,))))
        return self._pieces(self._parser.push(self._text.flush() + mark))

    def finish(self) -> OutputPieces:
        """The end of the tokens: returns the text that was held back."""
        words = self._pieces(self._parser.push(self._text.flush()))
        words.add(self._pieces(self._parser.finish()))
        if self.stopped is None:
            words.say(self._stop.flush())
        return words

    def _pieces(self, said: ParsedPieces) -> OutputPieces:
        words = OutputPieces()
        for piece in said.pieces:
            if self.stopped is not None:
                break
            if isinstance(piece, CallPiece):
                words.say(self._stop.flush())
                words.call(self._part(piece))
            elif piece.reasoning:
                words.say(piece.text, reasoning=True)
            else:
                words.say(self._stop.push(piece.text))
        return words

    def _part(self, piece: CallPiece) -> CallPart:
        if piece.name in self._custom:
            self._inputs[piece.index] = InputReader()
        reader = self._inputs.get(piece.index)
        arguments = piece.arguments if reader is None else reader.push(piece.arguments)
        id = None if piece.name is None else self._new_id(piece.name, piece.number)
        return CallPart(piece.index, id, piece.name, arguments, reader is not None)

    def _new_id(self, name: str, number: str) -> str:
        """An id that no other call of the answer has, whatever number the model gave it."""
        candidates = chain([number], map(str, count()))
        ids = (self._id.format(random=uuid.uuid4().hex, name=name, number=one) for one in candidates)
        id = next(id for id in ids if id not in self._ids)
        self._ids.add(id)
        return id
