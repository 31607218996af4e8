"""The wire types of the input of a response: the conversation's items, and the tools.

Unknown keys of a `Tolerant` type are ignored (wire/tolerant.py). Fields of this server's own answers are
accepted, so that the items of an answer can be sent back unchanged.
"""

from typing import Any, ClassVar, Literal

import msgspec

from personae.api.responses.mcp_items import (
    ApprovalRequest,
    ApprovalResponse,
    ChosenServer,
    McpCallItem,
    McpListItem,
    McpServerTool,
)
from personae.api.wire.conversation import FreeInput
from personae.api.wire.tolerant import Tolerant

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Tolerant, tag="input_text", tag_field="type"):
    """A piece of text from the client."""

    text: str


class PastText(Tolerant, tag="output_text", tag_field="type"):
    """A piece of text of an earlier answer."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Tolerant, tag="refusal", tag_field="type"):
    """A refusal in an earlier answer."""

    refusal: str


class InputImage(msgspec.Struct, tag="input_image", tag_field="type"):
    """An image; not supported, declared so that it is refused by name."""


class InputFile(msgspec.Struct, tag="input_file", tag_field="type"):
    """A file; not supported, declared so that it is refused by name."""


Piece = InputText | PastText | Refusal | InputImage | InputFile


class MessageItem(Tolerant, tag="message", tag_field="type", kw_only=True):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Piece]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class SummaryText(Tolerant, tag="summary_text", tag_field="type"):
    """A piece of a summary of reasoning."""

    text: str


class ReasoningText(Tolerant, tag="reasoning_text", tag_field="type"):
    """A piece of reasoning."""

    text: str


class ReasoningItem(Tolerant, tag="reasoning", tag_field="type", kw_only=True):
    """What the model thought before it answered; in `encrypted_content`, if it is nowhere else."""

    summary: list[SummaryText] = msgspec.field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


class _Call(Tolerant, kw_only=True):
    """What items of calls and of their results have in common. `namespace` is the tool's namespace."""

    call_id: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None


class FunctionCallItem(_Call, tag="function_call", tag_field="type", kw_only=True):
    """A call of a function that the model made earlier; `arguments` is JSON text."""

    name: str
    arguments: str


class CustomCallItem(_Call, tag="custom_tool_call", tag_field="type", kw_only=True):
    """A call of a custom tool that the model made earlier."""

    name: str
    input: str


class FunctionResult(_Call, tag="function_call_output", tag_field="type", kw_only=True):
    """What a function answered."""

    output: str | list[Piece]


class CustomResult(_Call, tag="custom_tool_call_output", tag_field="type", kw_only=True):
    """What a custom tool answered."""

    output: str | list[Piece]


class ItemReference(Tolerant, tag="item_reference", tag_field="type"):
    """A reference to an item of a stored response."""

    id: str


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionResult
    | CustomResult
    | ItemReference
    | McpListItem
    | McpCallItem
    | ApprovalRequest
    | ApprovalResponse
)


class FlatFunction(Tolerant, tag="function", tag_field="type"):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    watched: ClassVar[bool] = True

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class FlatGrammar(msgspec.Struct, tag="grammar", tag_field="type", forbid_unknown_fields=True):
    """A custom tool's input: text of a grammar, or of a regular expression that matches all of it."""

    definition: str
    syntax: Literal["lark", "regex"]


class FlatCustom(Tolerant, tag="custom", tag_field="type"):
    """A tool that takes text."""

    watched: ClassVar[bool] = True

    name: str
    description: str | None = None
    format: FreeInput | FlatGrammar | None = None


class NamespaceTool(Tolerant, tag="namespace", tag_field="type"):
    """Several tools under one name. A call of one of them names both."""

    watched: ClassVar[bool] = True

    name: str
    tools: list[FlatFunction | FlatCustom]
    description: str | None = None


class ChosenFunction(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this function must be called."""

    name: str


class ChosenCustom(msgspec.Struct, tag="custom", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this custom tool must be called."""

    name: str


class ChosenTools(msgspec.Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: only these, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunction | ChosenCustom | ChosenServer]


Tool = FlatFunction | FlatCustom | NamespaceTool | McpServerTool
ToolChoice = Literal["none", "auto", "required"] | ChosenFunction | ChosenCustom | ChosenServer | ChosenTools
