"""The wire types of the answer message, and of the events of a streamed one."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.wire.answers import Extension, UsageExtension

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextAnswer(msgspec.Struct, tag="text", tag_field="type"):
    """The text of the answer."""

    text: str
    citations: None = None


class ThinkingAnswer(msgspec.Struct, tag="thinking", tag_field="type"):
    """What the model thought before it answered."""

    thinking: str
    signature: str


class ToolUseAnswer(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextAnswer | ThinkingAnswer | ToolUseAnswer


class TokensThought(msgspec.Struct):
    """How many of the tokens were reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. `input_tokens` are those of the prompt that were not in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensThought
    cache_creation_input_tokens: int = 0
    personae: UsageExtension | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, tag="message", tag_field="type", kw_only=True):
    """The answer of `POST /v1/messages`."""

    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    personae: Extension | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag="message_start", tag_field="type"):
    """The first event: the message without content."""

    message: AnswerMessage


class BlockStart(msgspec.Struct, tag="content_block_start", tag_field="type"):
    """A block begins."""

    index: int
    content_block: Block


class TextGrowth(msgspec.Struct, tag="text_delta", tag_field="type"):
    """The new part of the text."""

    text: str


class ThinkingGrowth(msgspec.Struct, tag="thinking_delta", tag_field="type"):
    """The new part of the reasoning."""

    thinking: str


class Signature(msgspec.Struct, tag="signature_delta", tag_field="type"):
    """The end of the reasoning."""

    signature: str


class InputGrowth(msgspec.Struct, tag="input_json_delta", tag_field="type"):
    """The new part of a call's arguments, which are JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta", tag_field="type"):
    """A block grows."""

    index: int
    delta: TextGrowth | ThinkingGrowth | Signature | InputGrowth


class BlockStop(msgspec.Struct, tag="content_block_stop", tag_field="type"):
    """A block is complete."""

    index: int


class MessageEnd(msgspec.Struct):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta", tag_field="type"):
    """The end of the message, with its token counts."""

    delta: MessageEnd
    usage: MessageUsage
    personae: Extension | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag="message_stop", tag_field="type"):
    """The last event."""


class ErrorDetails(msgspec.Struct):
    """The features of a request that are not supported, and that clients can do without."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(msgspec.Struct, omit_defaults=True):
    """An error: its type, a message, the field concerned, a code for programs."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None
    details: ErrorDetails | None = None


class AnthropicError(msgspec.Struct, tag="error", tag_field="type"):
    """The body of every answer that is not a success, and the event that ends a broken stream."""

    error: AnthropicErrorDetail
    request_id: str | None = None


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError
)


class TokenCount(msgspec.Struct):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int
