"""The wire types of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

What comes back from earlier answers, or only describes something, is `Tolerant`: its unknown keys are ignored
and listed. `cache_control` is known but has no effect, because prompts are cached without it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from personae.api.wire.schema import Body, Sampling
from personae.api.wire.tolerant import Tolerant


class TextBlock(Tolerant, tag="text", tag_field="type"):
    """Text."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ImageBlock(Tolerant, tag="image", tag_field="type"):
    """An image; not supported, declared so that it is refused by name."""


class TextSource(Tolerant, tag="text", tag_field="type"):
    """A document's plain text."""

    data: str


class ContentSource(Tolerant, tag="content", tag_field="type"):
    """A document in blocks."""

    content: str | list[TextBlock | ImageBlock]


class UnreadSource(Tolerant, tag_field="type"):
    """A document that the model cannot read; declared so that it is refused by name."""


class Base64Source(UnreadSource, tag="base64"):
    """A PDF."""


class UrlSource(UnreadSource, tag="url"):
    """A PDF elsewhere."""


class FileSource(UnreadSource, tag="file"):
    """An uploaded file."""


class DocumentBlock(Tolerant, tag="document", tag_field="type"):
    """A document. `title` and `context` stand before its text."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Any = None
    cache_control: Any = None


class SearchResultBlock(Tolerant, tag="search_result", tag_field="type"):
    """What a search found. `title` and `source` stand before its text."""

    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None
    cache_control: Any = None


class ThinkingBlock(Tolerant, tag="thinking", tag_field="type"):
    """The reasoning of an earlier answer. One of this server's signatures may replace its text."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Tolerant, tag="redacted_thinking", tag_field="type"):
    """Reasoning that another server has encrypted; it is ignored."""

    data: str


class ToolUseBlock(Tolerant, tag="tool_use", tag_field="type"):
    """A call that the model made earlier."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(Tolerant, tag="tool_result", tag_field="type"):
    """What a tool answered."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class UserTurn(Tolerant, tag="user", tag_field="role"):
    """What the user says, and what tools answered."""

    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock]


class AssistantTurn(Tolerant, tag="assistant", tag_field="role"):
    """An earlier answer. If it is the last message, the answer continues it."""

    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemTurn(Tolerant, tag="system", tag_field="role"):
    """Instructions in the middle of the conversation."""

    content: str | list[TextBlock]


Turn = UserTurn | AssistantTurn | SystemTurn


class ToolDescription(Tolerant):
    """A function that the model may call; `input_schema` is the JSON Schema of its arguments."""

    watched: ClassVar[bool] = True

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class AutoChoice(msgspec.Struct, tag="auto", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: the model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag="any", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: one of the tools must be called."""

    disable_parallel_tool_use: bool | None = None


class OneChoice(msgspec.Struct, tag="tool", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this tool must be called."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, tag="none", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: no tool may be called."""


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, tag="enabled", tag_field="type", forbid_unknown_fields=True):
    """`thinking`: reason, with at most so many tokens."""

    budget_tokens: int
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, tag="adaptive", tag_field="type", forbid_unknown_fields=True):
    """`thinking`: reason as long as the model wants to."""

    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, tag="disabled", tag_field="type", forbid_unknown_fields=True):
    """`thinking`: do not reason."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class OutputFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """JSON that satisfies a schema; every keyword is enforced or the request is refused."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must be, and how much effort to spend on it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Tolerant):
    """About the request; without effect."""

    user_id: str | None = None


class Diagnostics(Tolerant):
    """Asks why the prompt cache did not have all of what an earlier message left. No answer says that."""

    previous_message_id: str | None = None


_NO_EDITS: tuple[Any, ...] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
)
"""The values of `context_management` that clear nothing."""

_FREE_FORM = ("messages", "system", "tools", "output_config")


class MessagesRequest(Sampling, kw_only=True):
    """`POST /v1/messages`, with Anthropic's fields and the sampling fields of chat completions."""

    free_form: ClassVar[tuple[str, ...]] = (*_FREE_FORM, "structured_outputs", "chat_template_kwargs")
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "billing_policy": (),
        "compaction": (),
        "container": (),
        "context_management": _NO_EDITS,
        "inference_geo": ("global",),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "stop": (),
    }

    model: str
    max_tokens: int
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolDescription] | None = None
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # As for chat completions.
    chat_template_kwargs: dict[str, Any] | None = None
    # Checked, but without effect.
    metadata: Metadata | None = None
    cache_control: Any = None
    # Listed as ignored where it names a message.
    diagnostics: Diagnostics | None = None
    # Not supported: `unserved` has the neutral values.
    billing_policy: Any = None
    compaction: Any = None
    container: Any = None
    context_management: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    service_tier: Any = None
    speed: Any = None
    # A conversation that the server stores. It is refused with a code of its own, so that clients continue
    # without it.
    thread: Any = None


class CountTokensRequest(Body, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields of a message that determine its prompt."""

    free_form: ClassVar[tuple[str, ...]] = (*_FREE_FORM, "chat_template_kwargs")
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": _NO_EDITS,
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDescription] | None = None
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None
