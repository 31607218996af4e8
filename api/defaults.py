"""Applies the defaults of the adapter that answers to the fields that a request leaves out."""

from msgspec import structs

from personae.api.adapters.defaults import RequestDefaults
from personae.api.wire.schema import ChatRequest, SamplingFields, StructuredOutputs

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "speculate",
)
_BINDING = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def fill(body: SamplingFields, defaults: RequestDefaults) -> None:
    """Put the defaults into the fields that are None. `max_tokens` and what the prompt consists of are not
    among these: see `Preparation.answer_length` and `prompt.render_chat`."""
    for name in _SAMPLING:
        if getattr(body, name) is None:
            setattr(body, name, defaults.get(name))
    if isinstance(body, ChatRequest):
        if body.enable_thinking is None and body.reasoning_effort is None:
            body.enable_thinking = defaults.get("enable_thinking")
        if not _binds(body):
            body.response_format = defaults.get("response_format")


def _binds(body: ChatRequest) -> bool:
    """Whether the request itself says what binds its answer, or that nothing does."""
    others = body.structured_outputs
    return any(getattr(body, name) is not None for name in _BINDING) or (
        others is not None
        and any(structs.asdict(others)[name] is not None for name in StructuredOutputs.kinds)
    )
