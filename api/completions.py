"""`POST /v1/completions`."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from personae.api import targets
from personae.api.body import read_json
from personae.api.bound import as_asked, bound_of, foreign_names
from personae.api.check import AnswerCheck
from personae.api.choices import Choice, Part
from personae.api.dialect import CHAT
from personae.api.exchange import Exchange, exchange_of
from personae.api.exclusion import NOTHING, exclusions
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.infill import Infill, infix_tokens
from personae.api.logprobs import prompt_logprobs, text_logprobs
from personae.api.output_pieces import OutputPieces, Span
from personae.api.packing import Pack, as_list
from personae.api.params import (
    answer_length,
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
from personae.api.prompt import check_ids, decode_ids, encode_texts
from personae.api.stream import TEXT, AnswerBuilder, EventStream, respond
from personae.api.wire.answers import Completion, TextChoice, Usage
from personae.api.wire.schema import CompletionRequest
from personae.engine.prompt_length import TooManyTokens
from personae.errors import RequestError, UnsupportedParameter

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: its ids, its text if it is echoed, and its name in errors."""

    tokens: list[int]
    text: str
    name: str


@operation(
    "POST",
    "/v1/completions",
    body=CompletionRequest,
    answers={200: (Completion, events(Completion))},
    headers=(targets.TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
)
async def completions(request: Request) -> Response | EventStream:
    """Continue one or more prompts, at once or as a stream. Choice p * n + i is choice i of prompt p."""
    exchange = exchange_of(request)
    body = await read_json(request, CompletionRequest, exchange)
    job, form = await admit(exchange, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(exchange: Exchange, body: CompletionRequest) -> tuple[Job, "CompletionBuilder"]:
    """Check everything and encode. The job is then ready to run."""
    prepared = await begin(exchange, body)
    exchange = prepared.exchange
    settings, client = exchange.settings, exchange.client
    infill = _infill(exchange, body)
    logprobs = logprob_count("logprobs", body.logprobs, settings)
    of_prompt = prepared.prompt_logprobs
    if body.echo and logprobs is not None:
        of_prompt = max(logprobs, of_prompt or 0)
    asked, default = asked_tokens(body.max_tokens), None
    if body.max_tokens is None:
        default = prepared.default_length or _DEFAULT_MAX_TOKENS
    most = prepared.kept(body, default if asked is None else asked)
    count, prompts = await exchange.prepared(lambda brief: _prepare(exchange, body, most, infill, brief))
    tokens = count * sum(len(prompt.tokens) for prompt in prompts)
    name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    prepared.keep_prompt_logprobs(of_prompt, tokens, name)
    bound = bound_of(body, strict=settings.default_strict)
    exchange.ignored.extend(foreign_names(body))
    grammar = as_asked(None if bound is None else bound.spec, body, settings)
    bound_by, checked = (None, None) if bound is None else (bound.param, bound.checked)
    left_out = await exclusions(exchange, body, bound_by) if body.excludes else NOTHING
    answers = not (asked == 0 and body.echo)
    job = Job.begin(exchange, "cmpl-", prepared.model, body, bound_by=bound_by)
    for place, prompt in enumerate(prompts):
        length = prepared.answer_length(
            asked if answers else 1,
            default,
            len(prompt.tokens),
            dialect=CHAT,
            param="max_tokens",
            prompt_param=prompt.name,
        )
        params = sampling_params(
            body,
            limits=client,
            settings=settings,
            max_tokens=length,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
            left_out=left_out,
            plain=False,
        )
        choices = [
            Choice(
                place * count + index,
                client.tokenizer,
                prepared.style,
                prompt=prompt.tokens,
                opening=prompt.text,
                echoed=bool(body.echo) and logprobs is not None,
                offsets=logprobs is not None,
                answers=answers,
                check=None if checked is None else AnswerCheck(exchange.caller.tenant, checked, {}),
            )
            for index in range(count)
        ]
        job.add(prompt.tokens, params, grammar, choices, prompt_param=prompt.name)
    body.prompt = ""  # it is in the logs, and may be long
    return job, CompletionBuilder(job, body, prompts, count)


def _infill(exchange: Exchange, body: CompletionRequest) -> Infill | None:
    """How the model fills in the middle; None without a `suffix`. Its tokens that end an answer are added to
    the body's. Raises UnsupportedParameter for another model and for what has no meaning then."""
    if not body.suffix:
        return None
    infill = Infill.of(exchange.client.tokenizer)
    if infill is None:
        raise UnsupportedParameter(
            "`suffix`: this model has no tokens to fill in the middle with; leave it out.", param="suffix"
        )
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise UnsupportedParameter(f"`{name}` and `suffix` cannot be combined.", param=name)
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UnsupportedParameter("With a `suffix`, `prompt` must be text.", param="prompt")
    if not body.ignore_eos:
        body.stop_token_ids = [*(body.stop_token_ids or ()), *infill.ends]
    return infill


def _prepare(
    exchange: Exchange, body: CompletionRequest, most: int | None, infill: Infill | None, brief: bool
) -> tuple[int, list[GivenPrompt]]:
    """The number of choices of each prompt, and the prompts; longer ones are cut to their last `most`
    tokens."""
    limit, settings = exchange.client.max_model_len, exchange.settings
    most_prompts = max(limit if most is None else len(body.prompt), settings.max_sequences)
    if isinstance(body.prompt, list) and len(body.prompt) > most_prompts:
        if isinstance(body.prompt[0], int):
            raise too_many_tokens(limit, "prompt")
        choices_of(body.n, settings, len(body.prompt))
    texts, ids = given_prompts(body.prompt)
    count = choices_of(body.n, settings, len(texts or ids))
    if body.best_of not in (None, count):
        raise UnsupportedParameter("`best_of` is not served; it may only equal `n`.", param="best_of")
    if infill is not None:
        return count, _infill_prompts(exchange, body, infill, texts, brief)
    return count, encoded_prompts(exchange, body, texts, ids, most, brief)


def _infill_prompts(
    exchange: Exchange, body: CompletionRequest, infill: Infill, texts: list[str], brief: bool
) -> list[GivenPrompt]:
    """The prompts with what comes after the answer. Raises RequestError for a text that is too long, and
    NotBrief."""
    assert body.suffix is not None
    tokenizer, limit = exchange.client.tokenizer, exchange.client.max_model_len
    names = ["prompt" if isinstance(body.prompt, str) else f"prompt[{index}]" for index in range(len(texts))]
    try:
        before = encode_texts(
            exchange, [*texts, body.suffix], add_special_tokens=False, brief=brief, limit=limit
        )
    except TooManyTokens as found:
        raise too_many_tokens(limit, [*names, "suffix"][found.index]) from None
    after = infix_tokens(tokenizer, body.suffix)
    begin = tokenizer.encode("")[:1] if body.add_special_tokens is not False else []
    begin = [id for id in begin if id == tokenizer.bos_id]
    return [
        GivenPrompt(infill.prompt(begin, tokens, after), "", name)
        for tokens, name in zip(before, names, strict=False)
    ]


def given_prompts(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]]]:
    """The prompts: texts, or lists of ids. Raises RequestError for an empty list or a mixed one."""
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise RequestError("`prompt` is empty.", param="prompt")
    texts = [value for value in prompt if isinstance(value, str)]
    lists = [value for value in prompt if isinstance(value, list)]
    ids = [value for value in prompt if isinstance(value, int)]
    if len(prompt) not in (len(texts), len(lists), len(ids)):
        raise RequestError(
            "`prompt` must be text, token ids, a list of texts or a list of lists.", param="prompt"
        )
    return texts, [ids] if ids else lists


def encoded_prompts(
    exchange: Exchange,
    body: CompletionRequest,
    texts: list[str],
    ids: list[list[int]],
    most: int | None,
    brief: bool,
) -> list[GivenPrompt]:
    """The prompts, from texts or from ids; longer ones are cut to their last `most` tokens. Raises
    RequestError."""
    one = not isinstance(body.prompt, list) or isinstance(body.prompt[0], int)
    names = ["prompt" if one else f"prompt[{index}]" for index in range(len(texts or ids))]
    limit = exchange.client.max_model_len
    for name, tokens in zip(names, ids, strict=False):
        if most is None and len(tokens) >= limit:
            answer_length(None, prompt=len(tokens), limit=limit, param="", prompt_param=name)
        check_ids(exchange, tokens, name)
    first = keeps_first(body)
    if most is not None:
        ids = [tokens[:most] if first else tokens[-most:] for tokens in ids]
    special = body.add_special_tokens is not False
    if texts:
        try:
            ids = encode_texts(
                exchange, texts, add_special_tokens=special, brief=brief, most=most, first=first, limit=limit
            )
        except TooManyTokens as found:
            raise too_many_tokens(limit, names[found.index]) from None
    if body.echo and (most is not None or not texts):
        texts = decode_ids(
            exchange, ids, skip_special_tokens=body.skip_special_tokens is not False, brief=brief
        )
    for name, tokens in zip(names, ids, strict=True):
        if not tokens:
            raise RequestError(f"`{name}` is empty.", param=name)
    shown = texts if body.echo else [""] * len(ids)
    return [GivenPrompt(*each) for each in zip(ids, shown, names, strict=True)]


class CompletionBuilder(AnswerBuilder):
    """Builds this route's answers. A stream's events have the same shape as the complete answer."""

    def __init__(self, job: Job, body: CompletionRequest, prompts: list[GivenPrompt], count: int) -> None:
        self._job = job
        self._body = body
        self._prompts = prompts
        self._count = count
        self._tokenizer = job.exchange.client.tokenizer
        self._usage = wants_usage(body)
        self._running_usage = wants_running_usage(body)
        self._begun: set[int] = set()
        self._as_ids = bool(body.return_tokens_as_token_ids)

    def whole(self, parts: list[Part], pack: Pack = as_list) -> Completion:
        """The complete answer of a request that is not streamed."""
        choices = [self._choice(part, pack) for part in parts]
        for choice, part in zip(choices, parts, strict=True):
            choice.prompt_logprobs = None
            if self._body.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(part.prompt_logprobs, self._tokenizer, pack)
                part.prompt_logprobs.clear()
            if choice.prompt_token_ids is UNSET:
                choice.prompt_token_ids = None
        return self._answer(choices, self._job.usage())

    def of(self, part: Part) -> Iterable[Completion]:
        """The event for a part, if it contains anything."""
        if part.tokens or part.finish is not None or part.entries or part.words.text:
            so_far = self._job.usage() if self._running_usage else None
            yield self._answer([self._choice(part)], so_far if self._usage else UNSET)

    def event_of_text(self, index: int) -> Completion | None:
        """As `AnswerBuilder`."""
        body = self._body
        if self._running_usage or body.logprobs is not None or body.return_token_ids:
            return None
        return next(iter(self.of(Part(index, OutputPieces([Span(TEXT)])))))

    def last(self) -> Iterable[Completion]:
        """The usage, if it was requested."""
        if self._usage:
            yield self._answer([], self._job.usage())

    def _answer(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> Completion:
        job = self._job
        return Completion(
            job.id, job.created, job.model.name, choices, job.exchange.services.fingerprint, usage=usage
        )

    def _choice(self, part: Part, pack: Pack = as_list) -> TextChoice:
        asked = self._body.logprobs is not None
        choice = TextChoice(
            index=part.index,
            text=part.words.text,
            logprobs=(
                text_logprobs(part.entries, self._tokenizer, pack, as_ids=self._as_ids) if asked else None
            ),
            finish_reason=part.finish,
            stop_reason=part.stop_reason,
            personae=part.extension,
        )
        if self._body.return_token_ids:
            choice.token_ids = part.tokens
            if part.index not in self._begun:
                choice.prompt_token_ids = self._prompts[part.index // self._count].tokens
                self._begun.add(part.index)
        return choice
