"""The wire types of answers. Fields that only an extension requested are left out if they are UNSET."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from personae.actors.on_demand import EngineState
from personae.api.adapters.defaults import RequestDefaults


class CachedTokens(msgspec.Struct, frozen=True):
    """How much of the prompt was in the prefix cache."""

    cached_tokens: int


class AnswerDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much of the answer was reasoning, including what opens and closes it. For a request with a
    `prediction`, also how many guessed tokens are in the answer, and how many are not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageExtension(msgspec.Struct, frozen=True):
    """How often an answer continued at an engine that may compute other tokens: other weights, another dtype
    or processor."""

    moved: int


class Usage(msgspec.Struct):
    """Token counts. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: AnswerDetails
    personae: UsageExtension | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One token at one place: its text, natural-log probability and bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """The token that was chosen at one place, and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """`logprobs` of a text completion; the four lists run in parallel.

    `text_offset` counts characters of the choice's text. The first token of an echoed prompt has no logprob.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """One candidate for one place in the prompt; ranks count from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By place in the prompt, by token id; None for the first token."""


class CalledFunction(msgspec.Struct, omit_defaults=True):
    """The function of a tool call; its arguments are JSON text. In a chunk: the new part of it."""

    arguments: str | None = None
    name: str | None = None


class CustomInput(msgspec.Struct, omit_defaults=True):
    """The call of a custom tool; its input is text. In a chunk: the new part of it."""

    input: str | None = None
    name: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call of the answer: of a function, or of a custom tool."""

    id: str
    type: str | None = None
    function: CalledFunction | None = None
    custom: CustomInput | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a tool call. The id, type and name come with the first one."""

    index: int
    function: CalledFunction | None = None
    custom: CustomInput | None = None
    id: str | None = None
    type: str | None = None


class Violation(msgspec.Struct, omit_defaults=True):
    """A part of an answer that violates its schema; in the arguments of `tool_call` if that is set."""

    pointer: str
    message: str
    tool_call: int | None = None


class Validation(msgspec.Struct):
    """Whether an answer that was not bound strictly is valid; null if the check would have taken too long.
    The first ten violations of each part."""

    valid: bool | None
    violations: list[Violation]


class Extension(msgspec.Struct):
    """`personae`: what OpenAI's fields cannot express."""

    validation: Validation


class ChatMessage(msgspec.Struct):
    """The answer. `content` is null if it consists only of calls. The reasoning is in two fields, because
    some clients know the one and some the other."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    personae: Extension | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """A chunk's share of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    personae: Extension | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed chat completion. `usage` is present (null until the last) if it was
    requested."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """One of `n` completions of one of the prompts, or a chunk of it (`finish_reason` null until the end)."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    personae: Extension | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of `POST /v1/completions`, or one event of it."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request is sampled with if it does not say. A `top_k` of 0 is off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(msgspec.Struct):
    """One name that a request may put in `model`; `parent` is the base's name for an adapter.

    `quantization` says how the base's weights are stored; null means as its dtype says. `rank` is the largest
    rank of an adapter's matrices, null for the base. `sampling_defaults` apply where a request says nothing.
    `defaults` are all that an uploaded adapter has of its own; lists leave them out. `state` is that of the
    base's engine, of a server with several: a request for one that is asleep starts it. `type`,
    `display_name`, `created_at` (RFC 3339) and `lifecycle` are for Anthropic's clients.
    """

    id: str
    created: int
    max_model_len: int
    parent: str | None
    root: str
    quantization: str | None
    rank: int | None
    display_name: str
    created_at: str
    sampling_defaults: SamplingDefaults
    defaults: RequestDefaults | UnsetType = UNSET
    state: EngineState | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "personae"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct):
    """The answer of `GET /v1/models`: all models. Anthropic's clients ask for pages, and this is one."""

    data: list[Model]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False


class Tokens(msgspec.Struct):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Status(msgspec.Struct, omit_defaults=True):
    """The answer of the probes. `cold_start_seconds`: no engine runs, and the first request waits about so
    long for one."""

    status: str
    cold_start_seconds: float | None = None


class Load(msgspec.Struct):
    """The answer of `GET /load`."""

    server_load: int


class Version(msgspec.Struct):
    """The answer of `GET /version`."""

    version: str


class Text(msgspec.Struct):
    """The answer of `POST /detokenize`."""

    prompt: str
