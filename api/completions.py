"""`POST /v1/completions`."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from personae.api import targets
from personae.api.adapters.defaults import RequestDefaults
from personae.api.answering import answering
from personae.api.body import read_json
from personae.api.bound import as_asked, bound_of, foreign_names
from personae.api.check import AnswerCheck, extension
from personae.api.choices import Choice, Part
from personae.api.context import RequestContext, context_of
from personae.api.deadline import TIMEOUT
from personae.api.defaults import fill
from personae.api.dialect import CHAT
from personae.api.exclusion import exclusions
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.infill import Infill, infix_tokens
from personae.api.logprobs import prompt_logprobs, text_logprobs
from personae.api.packing import Pack, as_list
from personae.api.params import (
    BYTES_OF_LOGPROB,
    answer_length,
    asked_tokens,
    check_prompt_logprobs,
    choices_of,
    keeps_first,
    kept_of_prompt,
    logprob_count,
    sampling_params,
    text_style,
    too_many_tokens,
)
from personae.api.respond import wants_running_usage, wants_usage
from personae.api.stream import AnswerBuilder, EventStream, respond
from personae.api.wire.answers import Completion, TextChoice, Usage
from personae.api.wire.schema import CompletionRequest, refuse_unserved
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
    headers=(TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
)
async def completions(request: Request) -> Response | EventStream:
    """Continue one or more prompts, at once or as a stream. Choice p * n + i is choice i of prompt p."""
    context = context_of(request)
    body = await read_json(request, CompletionRequest, context)
    job, form = await admit(context, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(context: RequestContext, body: CompletionRequest) -> tuple[Job, "CompletionBuilder"]:
    """Check everything and encode. The job is then ready to run."""
    refuse_unserved(body)
    context = await answering(context, body.model)
    settings, client = context.settings, context.client
    model = context.chosen(body)
    context = await context.with_defaults(model)
    fill(body, context.defaults)
    infill = _infill(context, body)
    wants_usage(body)
    style = text_style(body, settings)
    logprobs = logprob_count("logprobs", body.logprobs, settings)
    of_prompt = logprob_count("prompt_logprobs", body.prompt_logprobs, settings)
    if of_prompt is not None and body.stream:
        raise RequestError("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")
    if body.echo and logprobs is not None:
        of_prompt = max(logprobs, of_prompt or 0)
    asked = _asked(body, context.defaults)
    answers = not (asked == 0 and body.echo)
    most = kept_of_prompt(body.truncate_prompt_tokens, answer=asked or 1, limit=client.max_model_len)
    count, prompts = await context.prepared(lambda brief: _prepare(context, body, most, infill, brief))
    if of_prompt is not None:
        entries = count * sum(len(prompt.tokens) for prompt in prompts) * (of_prompt + 1)
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(entries, name, settings)
        context.keep(BYTES_OF_LOGPROB * entries)
    bound = bound_of(body, strict=settings.default_strict)
    context.ignored.extend(foreign_names(body))
    grammar = as_asked(None if bound is None else bound.spec, body, settings)
    bound_by = None if bound is None else bound.param
    left_out = await exclusions(context, body, bound_by)
    job = Job.begin(context, "cmpl-", model, body, bound_by=bound_by)
    for place, prompt in enumerate(prompts):
        length = _length(context, body, asked if answers else 1, len(prompt.tokens), prompt.name)
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
                style,
                prompt=prompt.tokens,
                opening=prompt.text,
                echoed=bool(body.echo) and logprobs is not None,
                offsets=logprobs is not None,
                answers=answers,
                check=None if bound is None else AnswerCheck.of(context.caller.tenant, bound.checked),
            )
            for index in range(count)
        ]
        job.add(prompt.tokens, params, grammar, choices, prompt_param=prompt.name)
    body.prompt = ""  # it is in the logs, and may be long
    return job, CompletionBuilder(job, body, prompts, count)


def _infill(context: RequestContext, body: CompletionRequest) -> Infill | None:
    """How the model fills in the middle; None without a `suffix`. Its tokens that end an answer are added to
    the body's. Raises UnsupportedParameter for another model and for what has no meaning then."""
    if not body.suffix:
        return None
    infill = Infill.of(context.client.tokenizer)
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


def _asked(body: CompletionRequest, defaults: RequestDefaults) -> int | None:
    """The most tokens of an answer. None for what is left of the context."""
    if body.max_tokens is None:
        return defaults.get("max_tokens") or _DEFAULT_MAX_TOKENS
    return asked_tokens(body.max_tokens)


def _length(
    context: RequestContext, body: CompletionRequest, asked: int | None, prompt: int, name: str
) -> int:
    """As params.answer_length. A default shrinks to what fits, because the client did not set it."""
    limit = context.client.max_model_len
    if body.max_tokens is None and asked is not None and prompt < limit:
        asked = min(asked, limit - prompt)
    elif CHAT.shrinks(context.settings):
        asked = context.shrunk(asked, limit - prompt)
    return answer_length(asked, prompt=prompt, limit=limit, param="max_tokens", prompt_param=name)


def _prepare(
    context: RequestContext, body: CompletionRequest, most: int | None, infill: Infill | None, brief: bool
) -> tuple[int, list[GivenPrompt]]:
    """The number of choices of each prompt, and the prompts; longer ones are cut to their last `most`
    tokens."""
    limit, settings = context.client.max_model_len, context.settings
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
        return count, _infill_prompts(context, body, infill, texts, brief)
    return count, encoded_prompts(context, body, texts, ids, most, brief)


def _infill_prompts(
    context: RequestContext, body: CompletionRequest, infill: Infill, texts: list[str], brief: bool
) -> list[GivenPrompt]:
    """The prompts with what comes after the answer. Raises RequestError for a text that is too long, and
    NotBrief."""
    assert body.suffix is not None
    tokenizer, limit = context.client.tokenizer, context.client.max_model_len
    names = ["prompt" if isinstance(body.prompt, str) else f"prompt[{index}]" for index in range(len(texts))]
    try:
        before = context.encode([*texts, body.suffix], add_special_tokens=False, brief=brief, limit=limit)
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
    context: RequestContext,
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
    limit = context.client.max_model_len
    for name, tokens in zip(names, ids, strict=False):
        if most is None and len(tokens) >= limit:
            answer_length(None, prompt=len(tokens), limit=limit, param="", prompt_param=name)
        context.check_ids(tokens, name)
    first = keeps_first(body)
    if most is not None:
        ids = [tokens[:most] if first else tokens[-most:] for tokens in ids]
    special = body.add_special_tokens is not False
    if texts:
        try:
            ids = context.encode(
                texts, add_special_tokens=special, brief=brief, most=most, first=first, limit=limit
            )
        except TooManyTokens as found:
            raise too_many_tokens(limit, names[found.index]) from None
    if body.echo and (most is not None or not texts):
        texts = context.decode(ids, skip_special_tokens=body.skip_special_tokens is not False, brief=brief)
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
        self._tokenizer = job.context.client.tokenizer
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
        if part.words.text or part.tokens or part.entries or part.finish is not None:
            so_far = self._job.usage() if self._running_usage else None
            yield self._answer([self._choice(part)], so_far if self._usage else UNSET)

    def last(self) -> Iterable[Completion]:
        """The usage, if it was requested."""
        if self._usage:
            yield self._answer([], self._job.usage())

    def _answer(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> Completion:
        job = self._job
        return Completion(job.id, job.created, job.model.name, choices, job.context.fingerprint, usage=usage)

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
            personae=extension(part),
        )
        if self._body.return_token_ids:
            choice.token_ids = part.tokens
            if part.index not in self._begun:
                choice.prompt_token_ids = self._prompts[part.index // self._count].tokens
                self._begun.add(part.index)
        return choice
