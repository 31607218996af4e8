"""Writes the items of MCP servers: lists of tools, calls, and requests for approval."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from personae.api.output_pieces import CallOutcome
from personae.api.responses.answers import (
    Event,
    ItemAdded,
    ItemDone,
    McpArgumentsDelta,
    McpArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListCompleted,
    McpListInProgress,
)
from personae.api.responses.item_ids import output_id
from personae.api.responses.items import Status
from personae.api.responses.mcp_items import (
    ApprovalRequest,
    CallError,
    ErrorText,
    McpCallItem,
    McpListItem,
    ProtocolError,
    ToolError,
)
from personae.api.responses.writing import ItemWriter, Numbered


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of an MCP server: the server's label, the tool's own name, and whether a call needs approval."""

    label: str
    name: str
    approval: bool


def listed(event: Numbered, response: str, lists: Sequence[McpListItem]) -> Iterator[Event]:
    """The events of lists of tools, which are the first items of a response."""
    for place, item in enumerate(lists):
        id = output_id("mcpl", response, place)
        empty = McpListItem(server_label=item.server_label, tools=[], id=id)
        yield event(ItemAdded, output_index=place, item=empty)
        yield event(McpListInProgress, output_index=place, item_id=id)
        yield event(McpListCompleted, output_index=place, item_id=id)
        yield event(ItemDone, output_index=place, item=msgspec.structs.replace(item, id=id))


def call_error(outcome: CallOutcome) -> CallError | None:
    """Why a call has no output; None if it has."""
    if outcome.output is not None:
        return None
    if outcome.code is None:
        return ToolError([ErrorText(outcome.error)])
    return ProtocolError(outcome.code, outcome.error)


class McpCallWriter(ItemWriter):
    """A call of a server's tool. `approved` is the request for approval that it had."""

    prefix = "mcp"

    def __init__(
        self, event: Numbered, response: str, index: int, tool: ServerTool, approved: str | None
    ) -> None:
        super().__init__(event, response, index)
        self.place = index
        self._tool = tool
        self._approved = approved
        self._outcome: CallOutcome | None = None

    def item(self, status: Status) -> McpCallItem:
        """The item as it is now."""
        outcome = self._outcome
        error = None if outcome is None else call_error(outcome)
        return McpCallItem(
            server_label=self._tool.label,
            name=self._tool.name,
            arguments=self.text,
            id=self.id,
            output=None if outcome is None else outcome.output,
            error=error,
            approval_request_id=self._approved,
            status=status if error is None else "failed",
        )

    def begin(self) -> Iterator[Event]:
        """The events after the item was announced."""
        yield self._event(McpCallInProgress)

    def end(self) -> Iterator[Event]:
        """The events before the call is made."""
        yield self._event(McpArgumentsDone, arguments=self.text)

    def settle(self, outcome: CallOutcome) -> Iterator[Event]:
        """The event after the call was made."""
        self._outcome = outcome
        yield self._event(McpCallFailed if outcome.output is None else McpCallCompleted)

    def _delta(self, text: str) -> Event:
        return self._event(McpArgumentsDelta, delta=text)


class ApprovalWriter(ItemWriter):
    """A call that the client has to approve. It has no events of its own."""

    prefix = "mcpr"

    def __init__(self, event: Numbered, response: str, index: int, tool: ServerTool) -> None:
        super().__init__(event, response, index)
        self._tool = tool

    def item(self, status: Status) -> ApprovalRequest:
        """The item as it is now."""
        return ApprovalRequest(
            server_label=self._tool.label, name=self._tool.name, arguments=self.text, id=self.id
        )

    def end(self) -> Iterator[Event]:
        """The events before the one that completes the item."""
        yield from ()

    def _delta(self, text: str) -> None:
        """None: the item has the arguments when it is complete."""
