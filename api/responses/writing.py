"""Writes the items of a response; each has events for its beginning, its increments and its end."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from msgspec import UNSET

from personae.api.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    InputDelta,
    InputDone,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from personae.api.responses.item_ids import output_id
from personae.api.responses.items import ReasoningText, Status
from personae.api.responses.sealed import sealed
from personae.api.wire.answers import ContentLogprob


class Numbered(Protocol):
    """Makes the next event."""

    def __call__(self, kind: type[Any], **fields: Any) -> Event:
        """An event of a kind, with its number."""


class ItemWriter(ABC):
    """An item at place `index` of the output of `response`, an id; `text` is what it has so far."""

    prefix = ""

    def __init__(self, event: Numbered, response: str, index: int) -> None:
        self.id = output_id(self.prefix, response, index)
        self._number = event
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What was written."""
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """The item as it is now."""

    def begin(self) -> Iterator[Event]:
        """The events after the item was announced."""
        yield from ()

    def write(self, text: str) -> Iterator[Event]:
        """Add to it."""
        self._pieces.append(text)
        if (event := self._delta(text)) is not None:
            yield event

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""

    @abstractmethod
    def _delta(self, text: str) -> Event | None:
        """The event of what was added, if there is one."""

    def _event(self, kind: type[Any], **fields: Any) -> Event:
        return self._number(kind, output_index=self._index, item_id=self.id, **fields)


class MessageWriter(ItemWriter):
    """A message of the answer, with `logprobs` of all its tokens if they were requested."""

    prefix = "msg"

    def __init__(self, event: Numbered, response: str, index: int, *, logprobs: bool) -> None:
        super().__init__(event, response, index)
        self._logprobs: list[ContentLogprob] | None = [] if logprobs else None
        self._latest: list[ContentLogprob] = []

    def add(self, logprobs: list[ContentLogprob]) -> None:
        """Add the logprobs of what is written next."""
        self._latest = logprobs
        if self._logprobs is not None:
            self._logprobs += logprobs

    def item(self, status: Status) -> OutputMessage:
        """The item as it is now."""
        return OutputMessage(self.id, status, [self._part()] if self._pieces else [])

    def begin(self) -> Iterator[Event]:
        """The events after the item was announced."""
        yield self._event(PartAdded, part=OutputText(""))

    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""
        yield self._event(TextDone, text=self.text, logprobs=list(self._logprobs or ()))
        yield self._event(PartDone, part=self._part())

    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=None if self._logprobs is None else list(self._logprobs))

    def _delta(self, text: str) -> Event:
        latest, self._latest = self._latest, []
        return self._event(TextDelta, delta=text, logprobs=latest)


class ReasoningWriter(ItemWriter):
    """The model's reasoning; at the end also `encrypted`, if that was requested."""

    prefix = "rs"

    def __init__(self, event: Numbered, response: str, index: int, *, encrypted: bool) -> None:
        super().__init__(event, response, index)
        self._encrypted = encrypted

    def item(self, status: Status) -> OutputReasoning:
        """The item as it is now."""
        item = OutputReasoning(self.id, status, [ReasoningText(self.text)] if self._pieces else [])
        if self._encrypted and status != "in_progress":
            item.encrypted_content = sealed(self.text)
        return item

    def begin(self) -> Iterator[Event]:
        """The events after the item was announced."""
        yield self._event(PartAdded, part=ReasoningText(""))

    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""
        yield self._event(ReasoningDone, text=self.text)
        yield self._event(PartDone, part=ReasoningText(self.text))

    def _delta(self, text: str) -> Event:
        return self._event(ReasoningDelta, delta=text)


class CallWriter(ItemWriter):
    """A call of a function."""

    prefix = "fc"

    def __init__(
        self, event: Numbered, response: str, index: int, id: str, name: str, namespace: str | None
    ) -> None:
        super().__init__(event, response, index)
        self._call_id = id
        self._name = name
        self._namespace = UNSET if namespace is None else namespace

    def item(self, status: Status) -> OutputItem:
        """The item as it is now."""
        return OutputCall(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""
        yield self._event(ArgumentsDone, name=self._name, arguments=self.text)

    def _delta(self, text: str) -> Event:
        return self._event(ArgumentsDelta, delta=text)


class CustomCallWriter(CallWriter):
    """A call of a custom tool."""

    prefix = "ctc"

    def item(self, status: Status) -> OutputItem:
        """The item as it is now."""
        return OutputCustomCall(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""
        yield self._event(InputDone, input=self.text)

    def _delta(self, text: str) -> Event:
        return self._event(InputDelta, delta=text)
