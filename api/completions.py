"""`POST /v1/completions`."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from personae.api.answers import Completion, TextChoice, Usage
from personae.api.bound import bound_of
from personae.api.check import AnswerCheck, extension
from personae.api.choices import Choice, Part
from personae.api.deadline import TIMEOUT
from personae.api.decode import read_json
from personae.api.generation import Door, Job, door_of
from personae.api.logprobs import prompt_logprobs, text_logprobs
from personae.api.operation import events, operation
from personae.api.params import (
    answer_length,
    choices_of,
    logprob_count,
    sampling_params,
    text_style,
)
from personae.api.respond import json_response, wants_usage
from personae.api.schema import CompletionRequest, refuse_unserved
from personae.api.stream import Chunks, EventStream
from personae.errors import RequestError, UnsupportedParameter

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt: its ids, its text if it is echoed, and its name in errors."""

    tokens: list[int]
    text: str
    name: str


@operation(
    "POST",
    "/v1/completions",
    body=CompletionRequest,
    answers={200: (Completion, events(Completion))},
    headers=(TIMEOUT,),
    refuses=(404, 504),
)
async def completions(request: Request) -> Response | EventStream:
    """Continue one or more prompts, at once or as a stream. Choice p * n + i is prompt p's i-th."""
    door = door_of(request)
    body = await read_json(request, CompletionRequest, door.settings.max_json_depth)
    job, form = await admit(door, body)
    if body.stream:
        return EventStream(request, job.run, form)
    return json_response(form.whole(await job.gather(request.receive)))


async def admit(door: Door, body: CompletionRequest) -> tuple[Job, "Form"]:
    """Check everything and encode; the job is ready to run."""
    refuse_unserved(body)
    settings, client = door.settings, door.client
    model = door.chosen(body)
    wants_usage(body)
    texts = _texts(body.prompt)
    count = choices_of(body.n, settings, len(texts))
    if body.best_of not in (None, count):
        raise UnsupportedParameter("`best_of` is not served; it may only equal `n`.", param="best_of")
    style = text_style(body, settings)
    bound = bound_of(body)
    logprobs = logprob_count("logprobs", body.logprobs, settings)
    of_prompt = logprob_count("prompt_logprobs", body.prompt_logprobs, settings)
    if of_prompt is not None and body.stream:
        raise RequestError("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")
    if body.echo and logprobs is not None:
        of_prompt = max(logprobs, of_prompt or 0)
    asked = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    answers = not (asked == 0 and body.echo)
    prompts = [await _encode(door, body, text, index) for index, text in enumerate(texts)]
    bound_by = None if bound is None else bound.param
    job = Job.begin(door, "cmpl-", model, bound_by=bound_by, timeout=body.timeout, priority=body.priority)
    for place, prompt in enumerate(prompts):
        length = _length(body, asked if answers else 1, len(prompt.tokens), client.max_model_len, prompt.name)
        params = sampling_params(
            body,
            limits=client,
            settings=settings,
            max_tokens=length,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
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
                check=None if bound is None else AnswerCheck.of(bound.checked),
            )
            for index in range(count)
        ]
        spec = None if bound is None else bound.spec
        job.add(prompt.tokens, params, spec, choices, prompt_param=prompt.name)
    return job, Form(job, body, prompts, count)


def _length(body: CompletionRequest, asked: int, prompt: int, limit: int, name: str) -> int:
    """As params.answer_length; the default of 16 shrinks to what fits, since nobody asked for it."""
    if body.max_tokens is None and prompt < limit:
        asked = min(asked, limit - prompt)
    return answer_length(asked, prompt=prompt, limit=limit, param="max_tokens", prompt_param=name)


def _texts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts, one by one. Raises RequestError for an empty list or a mixed one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("`prompt` is empty.", param="prompt")
    ids = [value for value in prompt if isinstance(value, int)]
    texts = [value for value in prompt if isinstance(value, str)]
    lists = [value for value in prompt if isinstance(value, list)]
    for same in (texts, lists):
        if len(same) == len(prompt):
            return [*same]
    if len(ids) == len(prompt):
        return [ids]
    raise RequestError(
        "`prompt` must be text, token ids, a list of texts or a list of lists.", param="prompt"
    )


async def _encode(door: Door, body: CompletionRequest, prompt: str | list[int], index: int) -> _Prompt:
    client = door.client
    one = not isinstance(body.prompt, list) or isinstance(body.prompt[0], int)
    name = "prompt" if one else f"prompt[{index}]"
    if isinstance(prompt, str):
        tokens = await door.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        text = prompt
    else:
        tokens = prompt
        if len(tokens) >= client.max_model_len:
            answer_length(None, prompt=len(tokens), limit=client.max_model_len, param="", prompt_param=name)
        for place, token in enumerate(tokens):
            if not 0 <= token < client.vocab_size:
                field = f"{name}[{place}]"
                raise RequestError(
                    f"`{field}` is no token of this model; ids are from 0 to {client.vocab_size - 1}.",
                    param=field,
                )
        skip = body.skip_special_tokens is not False
        text = client.tokenizer.decode(tokens, skip) if body.echo else ""
    if not tokens:
        raise RequestError(f"`{name}` is empty.", param=name)
    return _Prompt(tokens, text if body.echo else "", name)


class Form(Chunks):
    """The shape of this route's answers; a stream's events have the shape of the whole."""

    def __init__(self, job: Job, body: CompletionRequest, prompts: list[_Prompt], count: int) -> None:
        self._job = job
        self._body = body
        self._prompts = prompts
        self._count = count
        self._tokenizer = job.door.client.tokenizer
        self._usage = wants_usage(body)
        self._begun: set[int] = set()

    def whole(self, parts: list[Part]) -> Completion:
        """The answer that is not streamed."""
        choices = [self._choice(part) for part in parts]
        if self._body.prompt_logprobs is not None:
            for choice, part in zip(choices, parts, strict=True):
                choice.prompt_logprobs = prompt_logprobs(part.prompt_logprobs, self._tokenizer)
        return self._answer(choices, self._job.usage())

    def of(self, part: Part) -> Iterable[Completion]:
        """The event for a part, if it holds anything."""
        if part.words.text or part.tokens or part.entries or part.finish is not None:
            yield self._answer([self._choice(part)], None if self._usage else UNSET)

    def last(self) -> Iterable[Completion]:
        """The usage, if it was asked for."""
        if self._usage:
            yield self._answer([], self._job.usage())

    def _answer(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> Completion:
        job = self._job
        return Completion(job.id, job.created, job.model.name, choices, usage=usage)

    def _choice(self, part: Part) -> TextChoice:
        asked = self._body.logprobs is not None
        choice = TextChoice(
            index=part.index,
            text=part.words.text,
            logprobs=text_logprobs(part.entries, self._tokenizer) if asked else None,
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
