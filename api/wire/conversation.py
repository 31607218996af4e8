"""The wire types of a conversation: its messages, and the tools that it offers.

Unknown keys of a `Tolerant` type are ignored (tolerant.py). Elsewhere an unknown field is refused by name.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from personae.api.wire.tolerant import Tolerant
from personae.errors import RequestError


class TextPart(Tolerant, tag="text", tag_field="type"):
    """A piece of text in a message's content."""

    text: str


class RefusalPart(Tolerant, tag="refusal", tag_field="type"):
    """A refusal in an assistant message's content, from an earlier answer."""

    refusal: str


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """An image; not supported, declared so that it is refused by name."""


class AudioPart(msgspec.Struct, tag="input_audio", tag_field="type"):
    """Audio; not supported, declared so that it is refused by name."""


class VideoPart(msgspec.Struct, tag="video_url", tag_field="type"):
    """A video; not supported, declared so that it is refused by name."""


class FilePart(msgspec.Struct, tag="file", tag_field="type"):
    """A file; not supported, declared so that it is refused by name."""


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart
Content = str | list[ContentPart]


class FunctionCall(Tolerant):
    """A call that the model made earlier; `arguments` is JSON text."""

    name: str
    arguments: str


class CustomCall(Tolerant):
    """A call of a custom tool that the model made earlier."""

    name: str
    input: str


class PastToolCall(Tolerant):
    """A tool call in an assistant message of the history: of a function, or of a custom tool."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None


class SystemMessage(Tolerant, tag="system", tag_field="role"):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(Tolerant, tag="developer", tag_field="role"):
    """Instructions, under their newer name; a system message to templates that do not know it."""

    content: Content
    name: str | None = None


class UserMessage(Tolerant, tag="user", tag_field="role"):
    """What the user says."""

    content: Content
    name: str | None = None


class AssistantMessage(Tolerant, tag="assistant", tag_field="role"):
    """An earlier answer. All fields of this server's own answers are accepted; null ones mean nothing."""

    content: Content | None = None
    tool_calls: list[PastToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    # The form of calls before `tool_calls`; a message of the role `function` answers it.
    function_call: FunctionCall | None = None


class ToolMessage(Tolerant, tag="tool", tag_field="role"):
    """What a tool answered."""

    content: Content
    tool_call_id: str | None = None
    name: str | None = None


class FunctionMessage(Tolerant, tag="function", tag_field="role"):
    """What a function answered, in the form before there were tools."""

    name: str
    content: Content | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def check_results(messages: Sequence[Message]) -> None:
    """Raises RequestError for a tool's message that does not answer an earlier call. (A call without an id
    may be any.)"""
    calls: set[str | None] = set()
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            calls.update(call.id for call in message.tool_calls or ())
        elif isinstance(message, ToolMessage) and not {None, message.tool_call_id} & calls:
            given = message.tool_call_id
            what = (
                "is missing"
                if given is None
                else f"{given[:100]!r} does not belong to a call in an earlier message"
            )
            field = f"messages[{index}].tool_call_id"
            code = "missing_required_parameter" if given is None else None
            raise RequestError(f"`{field}` {what}: a tool's message answers a call.", param=field, code=code)


class FunctionTool(Tolerant):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    watched: ClassVar[bool] = True

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Tolerant, tag="function", tag_field="type"):
    """A tool."""

    watched: ClassVar[bool] = True

    function: FunctionTool


class FreeInput(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """A custom tool's input: any text."""


class GrammarSource(msgspec.Struct, forbid_unknown_fields=True):
    """A grammar, or a regular expression that matches all of the text."""

    definition: str
    syntax: Literal["lark", "regex"]


class BoundInput(msgspec.Struct, tag="grammar", tag_field="type", forbid_unknown_fields=True):
    """A custom tool's input: text of a grammar."""

    grammar: GrammarSource


class CustomSpec(Tolerant):
    """A tool that takes text."""

    watched: ClassVar[bool] = True

    name: str
    description: str | None = None
    format: FreeInput | BoundInput | None = None


class CustomTool(Tolerant, tag="custom", tag_field="type"):
    """A tool."""

    watched: ClassVar[bool] = True

    custom: CustomSpec


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Names one of the tools."""

    name: str


class NamedTool(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this function must be called."""

    function: FunctionName


class NamedCustomTool(msgspec.Struct, tag="custom", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this custom tool must be called."""

    custom: FunctionName


class ToolSelection(msgspec.Struct, forbid_unknown_fields=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustomTool]


class AllowedTools(msgspec.Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: only these."""

    allowed_tools: ToolSelection


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools
