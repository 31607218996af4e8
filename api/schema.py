"""The wire types of requests, field by field as OpenAI has them, with vLLM's spelling for the rest.

A field that is not here is refused by name. A field of OpenAI's that is not served is here with the values
that ask for nothing (`unserved`); any other value is refused by name too. Ranges are checked in params.py,
since they depend on the model.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from personae.errors import UnsupportedParameter


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request body. `free_form` names the fields whose nesting the client chooses."""

    free_form: ClassVar[tuple[str, ...]] = ()


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: whether a last chunk carries the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """The schema that an answer is bound by; `strict` absent means strict."""

    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: JSON that satisfies a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, tag="structural_tag", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: text with bound parts, in xgrammar's newer form (`format`) or its older one."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to bind an answer: one of `kinds`. A schema may be JSON text, a grammar is GBNF or Lark."""

    kinds: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    unserved: ClassVar[Mapping[str, Any]] = {
        "whitespace_pattern": None,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
    }

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    # Not served: `unserved` says what asks for nothing.
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


_BINDING = ("response_format", "structured_outputs", "guided_json")
_UNSERVED_GUIDED: Mapping[str, tuple[Any, ...]] = {
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
}


class WeightedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """One of several adapters that answer together."""

    name: str
    weight: float = 1.0


class SamplingFields(Body, kw_only=True):
    """What chat completions and completions have in common; None means that the default holds."""

    free_form: ClassVar[tuple[str, ...]] = _BINDING
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSERVED_GUIDED

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    # What vLLM adds.
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    # Our own.
    adapters: list[WeightedAdapter] | None = None
    # vLLM's: the lower, the earlier.
    priority: int | None = None
    # Ours: seconds from the request's arrival.
    timeout: float | None = None
    # What vLLM had before `structured_outputs`.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. A prompt is text, token ids, or a list of either."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_UNSERVED_GUIDED, "suffix": ("",)}

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None


class TextPart(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """A piece of text in a message's content."""

    text: str


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type", forbid_unknown_fields=True):
    """A refusal in an assistant message's content, from an earlier answer."""

    refusal: str


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """An image; not served, here to be refused by name."""


class AudioPart(msgspec.Struct, tag="input_audio", tag_field="type"):
    """Audio; not served, here to be refused by name."""


class VideoPart(msgspec.Struct, tag="video_url", tag_field="type"):
    """A video; not served, here to be refused by name."""


class FilePart(msgspec.Struct, tag="file", tag_field="type"):
    """A file; not served, here to be refused by name."""


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart
Content = str | list[ContentPart]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the model made earlier; `arguments` is JSON text."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a custom tool that the model made earlier."""

    name: str
    input: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in an assistant message of the history: of a function, or of a custom tool."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None


class SystemMessage(msgspec.Struct, tag="system", tag_field="role", forbid_unknown_fields=True):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag="developer", tag_field="role", forbid_unknown_fields=True):
    """Instructions, under their newer name; a system message to templates that do not know it."""

    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, tag="user", tag_field="role", forbid_unknown_fields=True):
    """What the user says."""

    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag="assistant", tag_field="role", forbid_unknown_fields=True):
    """An earlier answer. All fields that our own answers have are taken back; null ones mean nothing."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(msgspec.Struct, tag="tool", tag_field="role", forbid_unknown_fields=True):
    """What a tool answered."""

    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    """A tool."""

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


class CustomSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that takes text."""

    name: str
    description: str | None = None
    format: FreeInput | BoundInput | None = None


class CustomTool(msgspec.Struct, tag="custom", tag_field="type", forbid_unknown_fields=True):
    """A tool."""

    custom: CustomSpec


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Names one of the tools."""

    name: str


class NamedTool(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this function has to be called."""

    function: FunctionName


class NamedCustomTool(msgspec.Struct, tag="custom", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: this custom tool has to be called."""

    custom: FunctionName


class ToolSelection(msgspec.Struct, forbid_unknown_fields=True):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustomTool]


class AllowedTools(msgspec.Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: only these."""

    allowed_tools: ToolSelection


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    free_form: ClassVar[tuple[str, ...]] = (*_BINDING, "chat_template_kwargs", "tools")
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSERVED_GUIDED,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool | CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # The most tokens of reasoning; the names that vLLM, Qwen and llama.cpp have for it. -1: no limit.
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    # The caller's own bookkeeping: checked, and of no effect.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Not served: `unserved` lists the values that ask for nothing.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeRequest(Body, kw_only=True):
    """`POST /tokenize`, of a text (`prompt`) or of a conversation (`messages`)."""

    free_form: ClassVar[tuple[str, ...]] = ("chat_template_kwargs", "tools")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool | CustomTool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def refuse_unserved(request: SamplingFields) -> None:
    """Raise UnsupportedParameter, with its name, for the first field whose value would have to be ignored."""
    for name, harmless in request.unserved.items():
        value = getattr(request, name)
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in harmless):
            allowed = ", ".join(["null", *(msgspec.json.encode(ok).decode() for ok in harmless)])
            raise UnsupportedParameter(f"`{name}` is not served here; it may only be {allowed}.", param=name)
