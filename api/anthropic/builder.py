"""Builds a message: its blocks, complete or as events."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from personae.api.anthropic.answers import (
    AnswerMessage,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputGrowth,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Signature,
    StopReason,
    TextAnswer,
    TextGrowth,
    ThinkingAnswer,
    ThinkingGrowth,
    TokensThought,
    ToolUseAnswer,
)
from personae.api.anthropic.errors import anthropic_error
from personae.api.choices import Part
from personae.api.generation import Job
from personae.api.output_pieces import CallPart, Span
from personae.api.packing import Pack, as_list
from personae.api.responses.sealed import sealed
from personae.api.stream import AnswerBuilder
from personae.errors import PersonaeError

_PLAIN = "personae"
"""The signature of reasoning that is shown: clients require one, and there is nothing to sign."""


class MessageBuilder(AnswerBuilder):
    """Follows the one choice of a job: reasoning, text and calls become blocks, in the order in which they
    arrive.

    With `omitted` the reasoning's text is left out; the reasoning can be recovered from its signature.
    """

    done: ClassVar[bytes] = b""

    def __init__(self, job: Job, *, omitted: bool) -> None:
        self._job = job
        self._omitted = omitted
        self._content: list[Block] = []
        self._open: _OpenBlock | None = None
        self._begun = False
        self._message: AnswerMessage | None = None

    def whole(self, parts: list[Part], pack: Pack = as_list) -> AnswerMessage:
        """The complete message of a request that is not streamed."""
        for _ in self.of(parts[0]):
            pass
        assert self._message is not None, "a gathered choice has ended"
        return self._message

    def of(self, part: Part) -> Iterator[MessageEvent]:
        """The events for a part."""
        if not self._begun:
            self._begun = True
            yield MessageStart(self._fresh(before=True))
        for piece in part.words.pieces:
            if isinstance(piece, CallPart):
                if piece.id is not None:
                    yield from self._opened(_CallBlock(piece.id, piece.name or ""))
                yield from self._written(piece.arguments)
            elif isinstance(piece, Span):
                block = _ThinkingBlock(self._omitted) if piece.reasoning else _TextBlock()
                if type(self._open) is not type(block):
                    yield from self._opened(block)
                yield from self._written(piece.text)
        if part.finish is not None:
            yield from self._ended(part)

    def last(self) -> Iterator[MessageEvent]:
        """None: the message's end was already sent."""
        yield from ()

    def failed(self, error: PersonaeError) -> Iterator[MessageEvent]:
        """The event that ends a message that broke off."""
        yield anthropic_error(error)

    def _opened(self, block: "_OpenBlock") -> Iterator[MessageEvent]:
        yield from self._closed()
        self._open = block
        yield BlockStart(len(self._content), block.start())

    def _written(self, text: str) -> Iterator[MessageEvent]:
        assert self._open is not None
        self._open.pieces.append(text)
        if text and (delta := self._open.delta(text)) is not None:
            yield BlockDelta(len(self._content), delta)

    def _closed(self) -> Iterator[MessageEvent]:
        if self._open is None:
            return
        block, index = self._open.block(), len(self._content)
        if isinstance(block, ThinkingAnswer):
            yield BlockDelta(index, Signature(block.signature))
        self._content.append(block)
        self._open = None
        yield BlockStop(index)

    def _ended(self, part: Part) -> Iterator[MessageEvent]:
        yield from self._closed()
        end = MessageEnd(_stop_reason(part), part.stop_reason if isinstance(part.stop_reason, str) else None)
        message = self._message = self._fresh()
        message.content, message.personae = self._content, part.extension
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        yield MessageDelta(end, message.usage, message.personae)
        yield MessageStop()

    def _fresh(self, *, before: bool = False) -> AnswerMessage:
        """The message without content. If `before` any text, its counts are those of the prompt."""
        usage = self._job.usage(before=before)
        cached = usage.prompt_tokens_details.cached_tokens
        counts = MessageUsage(
            usage.prompt_tokens - cached,
            cached,
            usage.completion_tokens,
            TokensThought(usage.completion_tokens_details.reasoning_tokens),
            personae=usage.personae,
        )
        return AnswerMessage(id=self._job.id, model=self._job.model.name, content=[], usage=counts)


def _stop_reason(part: Part) -> StopReason:
    if part.finish == "length":
        return "max_tokens"
    if part.finish == "tool_calls":
        return "tool_use"
    return "stop_sequence" if isinstance(part.stop_reason, str) else "end_turn"


class _OpenBlock(ABC):
    """A block that is being written."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def start(self) -> Block:
        """The block as it is announced."""

    @abstractmethod
    def delta(self, text: str) -> TextGrowth | ThinkingGrowth | InputGrowth | None:
        """The event for new text. None if there is none."""

    @abstractmethod
    def block(self) -> Block:
        """The block as it is now."""


class _TextBlock(_OpenBlock):
    def start(self) -> TextAnswer:
        return TextAnswer("")

    def delta(self, text: str) -> TextGrowth:
        return TextGrowth(text)

    def block(self) -> TextAnswer:
        return TextAnswer(self.text)


class _ThinkingBlock(_OpenBlock):
    def __init__(self, omitted: bool) -> None:
        super().__init__()
        self._omitted = omitted

    def start(self) -> ThinkingAnswer:
        return ThinkingAnswer("", "")

    def delta(self, text: str) -> ThinkingGrowth | None:
        return None if self._omitted else ThinkingGrowth(text)

    def block(self) -> ThinkingAnswer:
        return ThinkingAnswer("", sealed(self.text)) if self._omitted else ThinkingAnswer(self.text, _PLAIN)


class _CallBlock(_OpenBlock):
    def __init__(self, id: str, name: str) -> None:
        super().__init__()
        self._id = id
        self._name = name

    def start(self) -> ToolUseAnswer:
        return ToolUseAnswer(self._id, self._name, {})

    def delta(self, text: str) -> InputGrowth:
        return InputGrowth(text)

    def block(self) -> ToolUseAnswer:
        return ToolUseAnswer(self._id, self._name, _arguments(self.text))


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty if a stop sequence or the end of its tokens cut it off."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
