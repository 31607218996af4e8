"""The wire types of a response, and of the events of a streamed one."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.responses.items import ReasoningText, Status, Tool, ToolChoice
from personae.api.responses.mcp_items import ApprovalRequest, McpCallItem, McpListItem
from personae.api.responses.request import ReasoningOptions, TextOptions
from personae.api.wire.answers import AnswerDetails, CachedTokens, ContentLogprob, Extension, UsageExtension

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] | None = None


class OutputMessage(msgspec.Struct, tag="message", tag_field="type"):
    """A message of the answer."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag="reasoning", tag_field="type"):
    """What the model thought before it answered."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: str | None = None


class OutputCall(msgspec.Struct, tag="function_call", tag_field="type"):
    """A call of a function; its arguments are JSON text. `namespace` is the function's namespace."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag="custom_tool_call", tag_field="type"):
    """A call of a custom tool; its input is text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = (
    OutputMessage
    | OutputReasoning
    | OutputCall
    | OutputCustomCall
    | McpListItem
    | McpCallItem
    | ApprovalRequest
)


class InputCounts(CachedTokens, frozen=True):
    """How much of the input was in the prefix cache. Writing to it costs nothing."""

    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputCounts
    output_tokens: int
    output_tokens_details: AnswerDetails
    total_tokens: int
    personae: UsageExtension | UnsetType = UNSET


class ResponseError(msgspec.Struct):
    """Why a response failed after it had begun."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Why a response ended before the model ended it."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ConversationRef(msgspec.Struct):
    """The conversation that a response belongs to."""

    id: str


class Response(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses`. It repeats the request's fields."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    parallel_tool_calls: bool
    tool_choice: ToolChoice
    tools: list[Tool]
    temperature: float
    top_p: float
    text: TextOptions
    reasoning: ReasoningOptions
    metadata: dict[str, Any]
    instructions: str | None
    max_output_tokens: int | None
    top_logprobs: int
    user: str | None
    completed_at: int | None = None
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    object: Literal["response"] = "response"
    background: bool = False
    store: bool = False
    previous_response_id: str | None = None
    conversation: ConversationRef | None = None
    service_tier: Literal["default"] = "default"
    truncation: Literal["disabled"] = "disabled"
    personae: Extension | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct):
    """The answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, tag="response.input_tokens", tag_field="object"):
    """The answer of `POST /v1/responses/input_tokens`."""

    input_tokens: int


class _Event(msgspec.Struct, kw_only=True):
    """Events count from 0."""

    sequence_number: int


class _OfItem(_Event, kw_only=True):
    output_index: int
    item_id: str


class _OfPart(_OfItem, kw_only=True):
    content_index: Literal[0] = 0


class Created(_Event, tag="response.created", tag_field="type"):
    """The first event."""

    response: Response


class InProgress(_Event, tag="response.in_progress", tag_field="type"):
    """The second event."""

    response: Response


class Completed(_Event, tag="response.completed", tag_field="type"):
    """The last event, with the whole response."""

    response: Response


class EndedEarly(_Event, tag="response.incomplete", tag_field="type"):
    """The last event of a response that has spent its tokens."""

    response: Response


class Failed(_Event, tag="response.failed", tag_field="type"):
    """The last event of a response that broke off."""

    response: Response


class ItemAdded(_Event, tag="response.output_item.added", tag_field="type"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done", tag_field="type"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class PartAdded(_OfPart, tag="response.content_part.added", tag_field="type"):
    """The text of an item begins."""

    part: OutputText | ReasoningText


class PartDone(_OfPart, tag="response.content_part.done", tag_field="type"):
    """The text of an item is complete."""

    part: OutputText | ReasoningText


class TextDelta(_OfPart, tag="response.output_text.delta", tag_field="type"):
    """The new part of a message."""

    delta: str
    logprobs: list[ContentLogprob]


class TextDone(_OfPart, tag="response.output_text.done", tag_field="type"):
    """A message's text."""

    text: str
    logprobs: list[ContentLogprob]


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta", tag_field="type"):
    """The new part of the reasoning."""

    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done", tag_field="type"):
    """The reasoning's text."""

    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", tag_field="type"):
    """The new part of a call's arguments."""

    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", tag_field="type"):
    """A call's arguments."""

    name: str
    arguments: str


class InputDelta(_OfItem, tag="response.custom_tool_call_input.delta", tag_field="type"):
    """The new part of a custom tool's input."""

    delta: str


class InputDone(_OfItem, tag="response.custom_tool_call_input.done", tag_field="type"):
    """A custom tool's input."""

    input: str


class McpListInProgress(_OfItem, tag="response.mcp_list_tools.in_progress", tag_field="type"):
    """The tools of an MCP server are listed."""


class McpListCompleted(_OfItem, tag="response.mcp_list_tools.completed", tag_field="type"):
    """They were listed."""


class McpCallInProgress(_OfItem, tag="response.mcp_call.in_progress", tag_field="type"):
    """A call of an MCP server's tool begins."""


class McpArgumentsDelta(_OfItem, tag="response.mcp_call_arguments.delta", tag_field="type"):
    """The new part of its arguments."""

    delta: str


class McpArgumentsDone(_OfItem, tag="response.mcp_call_arguments.done", tag_field="type"):
    """Its arguments."""

    arguments: str


class McpCallCompleted(_OfItem, tag="response.mcp_call.completed", tag_field="type"):
    """The tool has answered."""


class McpCallFailed(_OfItem, tag="response.mcp_call.failed", tag_field="type"):
    """The call failed."""


Event = (
    Created
    | InProgress
    | Completed
    | EndedEarly
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | McpListInProgress
    | McpListCompleted
    | McpCallInProgress
    | McpArgumentsDelta
    | McpArgumentsDone
    | McpCallCompleted
    | McpCallFailed
)
