"""`POST /v1/chat/completions`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from personae.api import targets
from personae.api.body import read_json
from personae.api.bound import Bound, as_asked, bound_of, foreign_names
from personae.api.check import AnswerCheck
from personae.api.choices import Choice, Part
from personae.api.dialect import CHAT, Dialect
from personae.api.exchange import Exchange, exchange_of
from personae.api.exclusion import NOTHING, exclusions
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.logprobs import chat_logprobs, prompt_logprobs
from personae.api.output_pieces import CallPart, OutputPieces, Span
from personae.api.packing import Pack, as_list
from personae.api.params import (
    asked_tokens,
    choices_of,
    keeps_first,
    logprob_count,
    sampling_params,
    too_many_tokens,
    wants_running_usage,
    wants_usage,
)
from personae.api.preparation import begin
from personae.api.prompt import encode_texts, render_chat
from personae.api.stream import TEXT, AnswerBuilder, EventStream, respond
from personae.api.templates.messages import plain_messages
from personae.api.templates.sandbox import PromptTooLong
from personae.api.templates.template import begun_reasoning
from personae.api.tools import (
    answer_shape,
    binding_field,
    functions_of,
    grammar_of,
    loose_functions,
    shown_tools,
)
from personae.api.wire.answers import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CustomInput,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from personae.api.wire.schema import ChatRequest
from personae.engine.prompt_length import TooManyTokens
from personae.errors import RequestError
from personae.grammar.reasoning.format import ReasoningFormat
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape


@operation(
    "POST",
    "/v1/chat/completions",
    body=ChatRequest,
    answers={200: (ChatCompletion, events(ChatChunk))},
    headers=(targets.TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
)
async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a conversation, at once or as a stream."""
    exchange = exchange_of(request)
    body = await read_json(request, ChatRequest, exchange)
    job, form = await admit(exchange, body)
    return await respond(request, job, form, stream=bool(body.stream))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What takes time to prepare for a request."""

    prompt: list[int]
    bound: Bound | None
    shape: AnswerShape | None
    grammar: GrammarSpec | None
    prediction: tuple[int, ...]


async def admit(
    exchange: Exchange, body: ChatRequest, prefix: str = "chatcmpl-", dialect: Dialect = CHAT
) -> tuple[Job, "ChatBuilder"]:
    """Check everything, render and encode. The job, whose id begins with `prefix`, is then ready to run.
    `dialect` is the API that the request came by."""
    prepared = await begin(exchange, body)
    exchange, model = prepared.exchange, prepared.model
    settings, client = exchange.settings, exchange.client
    count = choices_of(body.n, settings)
    logprobs = _logprobs(body, exchange)
    asked, param = _max_tokens(body)
    if asked is not None and asked < 1:
        raise RequestError(f"`{param}` must be at least 1; it is {asked}.", param=param, code="out_of_range")
    default = prepared.default_length
    kept = prepared.kept(body, default if asked is None else asked)
    ready = await exchange.prepared(lambda brief: _prepare(exchange, body, kept, dialect, brief))
    prompt, bound, shape = ready.prompt, ready.bound, ready.shape
    length = prepared.answer_length(
        asked, default, len(prompt), dialect=dialect, param=param, prompt_param="messages"
    )
    prepared.keep_prompt_logprobs(prepared.prompt_logprobs, count * len(prompt), "prompt_logprobs")
    bound_by = binding_field(body, bound)
    left_out = NOTHING
    if body.excludes:
        left_out = await exclusions(exchange, body, bound_by if ready.grammar is not None else None)
    params = sampling_params(
        body,
        limits=client,
        settings=settings,
        max_tokens=length,
        logprobs=logprobs,
        prompt_logprobs=prepared.prompt_logprobs,
        left_out=left_out,
        plain=model.adapter is None and ready.grammar is None and not body.tools,
        prediction=ready.prediction,
    )
    opening, reasons = _echo(body, exchange.family.reasoning)
    checked, loose = None if bound is None else bound.checked, loose_functions(shape)
    choices = [
        Choice(
            index,
            client.tokenizer,
            prepared.style,
            prompt=prompt,
            opening=opening,
            opening_reasons=reasons,
            shape=shape,
            special=exchange.family.special,
            check=AnswerCheck(exchange.caller.tenant, checked, loose) if checked or loose else None,
        )
        for index in range(count)
    ]
    job = Job.begin(exchange, prefix, model, body, bound_by=bound_by)
    job.budget_param = param
    job.add(prompt, params, ready.grammar, choices, prompt_param="messages")
    body.messages = []  # they are in the prompt, and may be long
    return job, ChatBuilder(job, body, prompt)


def _prepare(
    exchange: Exchange, body: ChatRequest, kept: int | None, dialect: Dialect, brief: bool
) -> _Prepared:
    """Render, encode, and find what binds the answer. The prompt comes first, because a prompt that is too
    long makes the rest unnecessary."""
    limit = exchange.client.max_model_len
    functions_of(body.tools, dialect=dialect)
    try:
        text = render_chat(
            exchange,
            body.messages,
            brief=brief,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=template_kwargs(exchange, body),
            tools=shown_tools(body.tools),
            chat_template=body.chat_template,
            characters=exchange.client.tokenizer.longest_text(limit) if kept is None else None,
        )
        (prompt,) = encode_texts(
            exchange,
            [text],
            add_special_tokens=bool(body.add_special_tokens),
            brief=brief,
            most=kept,
            first=keeps_first(body),
            limit=limit,
        )
    except (TooManyTokens, PromptTooLong):
        raise too_many_tokens(limit, "messages") from None
    prediction = _predicted(exchange, body, brief)
    bound = bound_of(body, strict=exchange.settings.default_strict)
    exchange.ignored.extend(foreign_names(body))
    strict = exchange.settings.default_strict
    shape = answer_shape(body, exchange.family, text, bound, strict=strict, dialect=dialect)
    grammar = as_asked(grammar_of(bound, shape), body, exchange.settings)
    return _Prepared(prompt, bound, shape, grammar, prediction)


def _predicted(exchange: Exchange, body: ChatRequest, brief: bool) -> tuple[int, ...]:
    """The tokens of the predicted answer, as many as an answer may have. None if there are no drafts."""
    if body.prediction is None or body.speculate is False:
        return ()
    limit = exchange.client.max_model_len
    text = body.prediction.text[: exchange.client.tokenizer.longest_text(limit)]
    (tokens,) = encode_texts(exchange, [text], add_special_tokens=False, brief=brief, most=limit, first=True)
    return tuple(tokens)


def template_kwargs(exchange: Exchange, body: ChatRequest) -> dict[str, Any]:
    """The template variables that the request sets, each under the template's name for it."""
    family = exchange.family
    thinking, effort = family.thinking(body.enable_thinking), family.effort(body.reasoning_effort)
    return {**thinking, **effort, **(body.chat_template_kwargs or {})}


def _logprobs(body: ChatRequest, exchange: Exchange) -> int | None:
    top = logprob_count("top_logprobs", body.top_logprobs, exchange.settings)
    if top is not None and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    return (top or 0) if body.logprobs else None


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The requested number of tokens, and which of the field's two names was used."""
    older, newer = asked_tokens(body.max_tokens), asked_tokens(body.max_completion_tokens)
    if newer is None:
        return older, "max_tokens"
    if older not in (None, newer):
        raise RequestError(
            "`max_tokens` is the older name of `max_completion_tokens`; they must not differ.",
            param="max_tokens",
        )
    return newer, "max_completion_tokens"


def _echo(body: ChatRequest, format: ReasoningFormat | None) -> tuple[str, bool]:
    """The text that `echo` puts before the answer, and whether it is reasoning: the message that is
    continued."""
    if not body.echo:
        return "", False
    if not body.continue_final_message:
        raise RequestError("`echo` needs `continue_final_message` to be true.", param="echo")
    thought = begun_reasoning(body.messages[-1], format)
    if thought is not None and format is not None and format.continues(thought):
        return thought.lstrip().removeprefix(format.open).lstrip("\n"), True
    return str(plain_messages(body.messages[-1:])[0]["content"]), False


class ChatBuilder(AnswerBuilder):
    """Builds this route's answers.

    A stream's events are the role, the text as it arrives, the reason why it ended, and the usage if it was
    requested.
    """

    def __init__(self, job: Job, body: ChatRequest, prompt: list[int]) -> None:
        self._job = job
        self._body = body
        self._prompt = prompt
        self._tokenizer = job.exchange.client.tokenizer
        self._begun: set[int] = set()
        self._usage = wants_usage(body)
        self._running_usage = wants_running_usage(body)
        self._reasoning = body.include_reasoning is not False
        self._as_ids = bool(body.return_tokens_as_token_ids)

    def whole(self, parts: list[Part], pack: Pack = as_list) -> ChatCompletion:
        """The complete answer of a request that is not streamed."""
        job, body = self._job, self._body
        answer = ChatCompletion(
            job.id,
            job.created,
            job.model.name,
            [self._choice(part, pack) for part in parts],
            job.usage(),
            job.exchange.services.fingerprint,
        )
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(parts[0].prompt_logprobs, self._tokenizer, pack)
        if body.return_token_ids:
            answer.prompt_token_ids = self._prompt
        return answer

    def of(self, part: Part) -> Iterable[ChatChunk]:
        """The events for a part."""
        ids = self._body.return_token_ids
        if part.index not in self._begun:
            nothing = self._job.usage(before=True) if self._running_usage else None
            chunk = self._chunk([ChatChunkChoice(part.index, ChatDelta("assistant", ""))], nothing)
            if ids and not self._begun:
                chunk.prompt_token_ids = self._prompt
            self._begun.add(part.index)
            yield chunk
        deltas = _deltas(part.words, reasoning=self._reasoning)
        if not deltas and part.tokens and (ids or part.entries):
            deltas.append(ChatDelta(content=""))
        for place, delta in enumerate(deltas):
            choice = ChatChunkChoice(part.index, delta)
            if place == 0:
                if self._body.logprobs:
                    choice.logprobs = self._logprobs(part)
                if ids:
                    choice.token_ids = part.tokens
            yield self._chunk([choice])
        if part.finish is not None:
            end = ChatChunkChoice(part.index, ChatDelta(), finish_reason=part.finish)
            end.stop_reason = part.stop_reason
            end.personae = part.extension
            yield self._chunk([end])

    def event_of_text(self, index: int) -> ChatChunk | None:
        """As `AnswerBuilder`."""
        body = self._body
        if self._running_usage or body.logprobs or body.return_token_ids:
            return None
        return self._chunk([ChatChunkChoice(index, ChatDelta(content=TEXT))])

    def last(self) -> Iterable[ChatChunk]:
        """The usage, if it was requested."""
        if self._usage:
            yield self._chunk([], self._job.usage())

    def _choice(self, part: Part, pack: Pack) -> ChatChoice:
        assert part.finish is not None, "a gathered choice has ended"
        choice = ChatChoice(
            part.index,
            _message(part.words, reasoning=self._reasoning),
            self._logprobs(part, pack) if self._body.logprobs else None,
            part.finish,
            part.stop_reason,
        )
        choice.personae = part.extension
        if self._body.return_token_ids:
            choice.token_ids = part.tokens
        return choice

    def _logprobs(self, part: Part, pack: Pack = as_list) -> ChatLogprobs:
        return chat_logprobs(part.entries, self._tokenizer, pack, as_ids=self._as_ids)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        job = self._job
        if usage is None and self._running_usage:
            usage = job.usage()
        return ChatChunk(
            job.id,
            job.created,
            job.model.name,
            choices,
            job.exchange.services.fingerprint,
            usage=usage if self._usage else UNSET,
        )


def _message(words: OutputPieces, *, reasoning: bool) -> ChatMessage:
    message = ChatMessage(words.text)
    if reasoning and words.reasoning:
        message.reasoning = message.reasoning_content = words.reasoning
    if words.calls:
        message.content = words.text or None
        message.tool_calls = [_call(call) for call in words.calls]
    return message


def _deltas(words: OutputPieces, *, reasoning: bool) -> list[ChatDelta]:
    """The answer in order: one delta per piece; adjacent calls share one."""
    deltas: list[ChatDelta] = []
    calls: list[ToolCallDelta] | None = None  # of the last delta
    for piece in words.pieces:
        if isinstance(piece, CallPart):
            if calls is None:
                calls = []
                deltas.append(ChatDelta(tool_calls=calls))
            calls.append(_call_delta(piece))
            continue
        calls = None
        if isinstance(piece, Span) and not piece.reasoning:
            deltas.append(ChatDelta(content=piece.text))
        elif isinstance(piece, Span) and reasoning:
            deltas.append(ChatDelta(reasoning=piece.text, reasoning_content=piece.text))
    return deltas


def _call(call: CallPart) -> ToolCall:
    if call.custom:
        return ToolCall(call.id or "", "custom", custom=CustomInput(call.arguments, call.name))
    return ToolCall(call.id or "", "function", CalledFunction(call.arguments, call.name))


def _call_delta(call: CallPart) -> ToolCallDelta:
    if call.custom:
        kind, custom = "custom", CustomInput(call.arguments, call.name)
        return ToolCallDelta(call.index, None, custom, call.id, None if call.id is None else kind)
    function = CalledFunction(call.arguments, call.name)
    return ToolCallDelta(call.index, function, None, call.id, None if call.id is None else "function")
