"""The wire types of requests, with OpenAI's fields, and vLLM's names for the rest.

An unknown field is refused by name, unless it is another server's with a neutral value (foreign.py), or the
server ignores unknown fields. A field of OpenAI that is not supported is declared here with its neutral
values (`unserved`); any other value is refused by name too. Ranges are checked in params.py, because they
depend on the model.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec

from personae.api.wire.compat_names import field_here
from personae.api.wire.conversation import CustomTool, Message, Tool, ToolChoice
from personae.api.wire.foreign import allowed, one_of
from personae.api.wire.prompt_cache import CacheOptions, Retention, SessionName
from personae.errors import UnsupportedParameter


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request body. `free_form` names the fields whose nesting the client chooses.

    `unserved` names the fields that are not supported, with their neutral values (null is one). `unheeded`
    names those whose value is accepted without effect. The answer lists these for the client, and everything
    else that is `ignored`.
    """

    free_form: ClassVar[tuple[str, ...]] = ()
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unheeded: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def read(cls, body: bytes, ignored: list[str]) -> Self:
        """Parse `body`. Raises what msgspec raises."""
        return msgspec.json.decode(body, type=cls)

    @classmethod
    def prepared(cls, value: Any, ignored: list[str]) -> Any:
        """A body that has been parsed already, untyped, in the form that `of` takes."""
        return value

    @classmethod
    def of(cls, value: Any) -> Self:
        """A body that has been `prepared`. Raises msgspec's ValidationError."""
        return msgspec.convert(value, cls, str_keys=True)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much to reason. A chat template that takes it gets the word as it is."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: whether a last chunk has the usage, and every chunk the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: free text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type", forbid_unknown_fields=True):
    """`response_format`: any JSON object, or one that satisfies a `schema`."""

    schema: dict[str, Any] | bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """The schema that an answer is bound by. Without `strict` as much of it as possible, unless the server
    was started with `--default-strict`."""

    schema: dict[str, Any] | bool
    name: str | None = None
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
        "disable_additional_properties": False,
    }

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    # JSON without blanks between its tokens, whatever field binds the answer. None: the server's default.
    disable_any_whitespace: bool | None = None
    # Not supported: `unserved` has the neutral values.
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


_BINDING = ("response_format", "structured_outputs", "guided_json")
_UNSERVED_OF_VLLM: Mapping[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "request_id": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


class WeightedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """One of several adapters that answer together."""

    name: str
    weight: float = 1.0


class Sampling(Body, kw_only=True):
    """The fields of every request for an answer. None means the default."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # vLLM's additions.
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    # The lower, the earlier.
    priority: int | None = None
    # Extensions of Personae. `timeout`: seconds from the request's arrival.
    adapters: list[WeightedAdapter] | None = None
    jump_forward: bool | None = None
    speculate: bool | None = None
    # The order of the properties of bound JSON. None is the schema's order.
    property_order: Literal["schema", "any"] | None = None
    timeout: float | None = None

    @property
    def excludes(self) -> bool:
        """Whether it names tokens or words that the answer may not have."""
        return self.allowed_token_ids is not None or bool(self.bad_words)


class PredictedText(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a prediction."""

    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that is expected as a large part of the answer."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        """The whole text."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class SamplingFields(Sampling, kw_only=True):
    """What chat completions and completions have in common."""

    free_form: ClassVar[tuple[str, ...]] = _BINDING
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSERVED_OF_VLLM

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # vLLM's additions.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    # vLLM's older names for `structured_outputs`.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Fields of vLLM that are not supported: `unserved` has the neutral values.
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    request_id: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. A prompt is text, token ids, or a list of either. With a `suffix` the answer
    stands between the prompt and it."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSERVED_OF_VLLM,
        "prompt_embeds": (),
    }

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    prompt_embeds: Any = None
    suffix: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    free_form: ClassVar[tuple[str, ...]] = (*_BINDING, "chat_template_kwargs", "tools")
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSERVED_OF_VLLM,
        "audio": (),
        "best_of": (1,),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "service_tier": ("auto", "default", "flex"),
        "store": (True, False),
        "verbosity": ("low", "medium"),
        "web_search_options": (),
    }
    unheeded: ClassVar[Mapping[str, Any]] = {"store": True, "prompt_cache_retention": "24h"}

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool | CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None
    # vLLM's field: false leaves the reasoning out of the answer.
    include_reasoning: bool | None = None
    # The most tokens of reasoning, under the names of vLLM, Qwen and llama.cpp. -1: no limit.
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    # The caller's own bookkeeping: checked, but without effect.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # The session, how long its keys and values are kept, and whether they may go to a disk.
    prompt_cache_key: SessionName | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    # Not supported: `unserved` has the neutral values.
    audio: Any = None
    best_of: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
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
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool | CustomTool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def refuse_unserved(request: Body) -> None:
    """Raise UnsupportedParameter, with its name, for the first field whose value would have to be ignored."""
    for name, harmless in request.unserved.items():
        value = getattr(request, name)
        if value is not None and not one_of(value, harmless):
            here = field_here(name, request.__struct_fields__)
            hint = "" if here is None else f" Here it is `{here}`."
            raise UnsupportedParameter(
                f"`{name}` is not served here; it may only be {allowed(harmless)}.{hint}", param=name
            )
