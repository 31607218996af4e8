"""The wire types of `POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec

from personae.api.responses.items import Item, Tool, ToolChoice
from personae.api.responses.sealed import unsealed
from personae.api.wire.prompt_cache import CacheOptions, Retention, SessionName
from personae.api.wire.schema import Body, Effort, JsonObjectFormat, Sampling, TextFormat

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

_LEFT_OUT = frozenset({"image_generation", "tool_search", "web_search", "web_search_preview"})
"""Hosted tools that clients offer by themselves. The model does not see them."""
_LEFT_OUT_ITEMS = frozenset({"image_generation_call", "web_search_call"})
"""The items of such tools in earlier answers."""


class SchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """`text.format`: JSON that satisfies a schema; without `strict` as much of it as possible, unless
    the server was started with `--default-strict`."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium"] | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How much to reason. The whole reasoning is in the answer, so no other summary of it exists. The chat
    template decides which earlier reasoning is shown, and there is one mode."""

    context: Literal["auto"] | None = None
    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`; they have no effect."""

    include_obfuscation: Literal[False] | None = None


class BackgroundOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`background_options`: within what time the answer has to be there, and what it belongs to. They have
    no effect, because every answer is made as soon as there is room."""

    completion_window: Literal["soonest", "2h", "8h"] | None = None
    continuation_id: str | None = None


class ConversationId(msgspec.Struct, forbid_unknown_fields=True):
    """`conversation` as an object."""

    id: str


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # For hosted tools, which have no items here.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ItemsBody(Body, kw_only=True):
    """A body with items (`input` or `items`) or tools. Optional hosted tools are left out. An item without a
    `type` that has a `role` is a message."""

    @classmethod
    def read(cls, body: bytes, ignored: list[str]) -> Self:
        """Parse `body`. Raises what msgspec raises."""
        return cls.of(cls.prepared(msgspec.json.decode(body), ignored))

    @classmethod
    def prepared(cls, value: Any, ignored: list[str]) -> Any:
        """See Body."""
        if not isinstance(value, dict):
            return value
        readable = {**value}
        for name in ("input", "items"):
            if isinstance(items := value.get(name), list):
                readable[name] = [_readable(item, ignored) for item in _kept(items, name, ignored)]
        if isinstance(tools := value.get("tools"), list):
            readable["tools"] = _kept(tools, "tools", ignored)
        return readable


class ResponsesRequest(ItemsBody, Sampling, kw_only=True):
    """`POST /v1/responses`. `input` is the user's text, or the whole conversation."""

    free_form: ClassVar[tuple[str, ...]] = (
        "input",
        "text",
        "tools",
        "structured_outputs",
        "chat_template_kwargs",
    )
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "context_management": ([],),
        "image": (),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default", "flex"),
        "truncation": ("disabled",),
    }
    unheeded: ClassVar[Mapping[str, Any]] = {"prompt_cache_retention": "24h"}
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Include] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    # Whether the response is stored, and the stored one that it follows.
    store: bool | None = None
    previous_response_id: str | None = None
    # The kept conversation that it belongs to, and whether its client fetches the answer later.
    conversation: str | ConversationId | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    # As for chat completions.
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    # How often the tools of MCP servers may be called.
    max_tool_calls: int | None = None
    # The caller's own bookkeeping: checked, but without effect.
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # The session, how long its keys and values are kept, and whether they may go to a disk.
    prompt_cache_key: SessionName | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    # Not supported: `unserved` has the neutral values.
    access_programs: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    service_tier: Any = None
    truncation: Any = None


class InputTokensRequest(ItemsBody, kw_only=True):
    """`POST /v1/responses/input_tokens`: the fields of a response that decide about its prompt, and some that
    clients send with them."""

    free_form: ClassVar[tuple[str, ...]] = ("input", "text", "tools", "chat_template_kwargs")
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"personality": (), "truncation": ("disabled",)}

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Not supported: `unserved` has the neutral values.
    personality: Any = None
    truncation: Any = None

    def response(self) -> ResponsesRequest:
        """The request for a response with this prompt."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in self.unserved}
        return ResponsesRequest(**{**fields, "input": self.input or []})


def _kept(entries: list[Any], name: str, ignored: list[str]) -> list[Any]:
    """The entries without optional hosted tools."""
    left_out = _LEFT_OUT if name == "tools" else _LEFT_OUT_ITEMS  # of `input` or `items`
    kept = []
    for entry in entries:
        type = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(type, str) and (type in left_out or type.startswith("web_search_preview_")):
            ignored.append(f"{name}[].{type}")
        else:
            kept.append(entry)
    return kept


def _readable(item: Any, ignored: list[str]) -> Any:
    """An item with its type, and without reasoning that another server has encrypted."""
    if not isinstance(item, dict):
        return item
    if "role" in item and item.get("type") is None:
        return {**item, "type": "message"}
    sealed = item.get("encrypted_content")
    if item.get("type") == "reasoning" and isinstance(sealed, str) and unsealed(sealed) is None:
        ignored.append("input[].encrypted_content")
        return {**item, "encrypted_content": None}
    return item


def conversation_id(body: ResponsesRequest) -> str | None:
    """The conversation that a request names."""
    named = body.conversation
    return named.id if isinstance(named, ConversationId) else named
