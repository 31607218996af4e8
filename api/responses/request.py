"""The wire type of `POST /v1/responses`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec

from personae.api.responses.items import Item, Tool, ToolChoice
from personae.api.wire.schema import JsonObjectFormat, Sampling, TextFormat

LOGPROBS = "message.output_text.logprobs"


class SchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """`text.format`: JSON that satisfies a schema; without `strict` as much of it as possible, unless
    the server was started with `--default-strict`."""

    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer's text has to be."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How much to reason. The reasoning is given whole, so "auto" asks for no other summary of it."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`; none of them changes anything."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """`POST /v1/responses`. `input` is what the user says, or the whole conversation."""

    free_form: ClassVar[tuple[str, ...]] = (
        "input",
        "text",
        "tools",
        "structured_outputs",
        "chat_template_kwargs",
    )
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    # As for chat completions.
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    # The caller's own bookkeeping, and a limit on tools that are not here: checked, and of no effect.
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Not served: `unserved` lists the values that ask for nothing.
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    truncation: Any = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse `body`. Raises what msgspec raises."""
        return cls.of(msgspec.json.decode(body))

    @classmethod
    def of(cls, value: Any) -> Self:
        """See Body; an item without a `type` that has a `role` is a message."""
        if isinstance(value, dict) and isinstance(items := value.get("input"), list):
            value = {**value, "input": [_typed(item) for item in items]}
        return super().of(value)


def _typed(item: Any) -> Any:
    plain = isinstance(item, dict) and "role" in item and item.get("type") is None
    return {**item, "type": "message"} if plain else item
