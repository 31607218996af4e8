"""Runs many prompts of one request through the engine, some at a time, and collects what each leaves."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from starlette.types import Receive

from personae.actors.client import ModelCard
from personae.api.choices import Choice, Part
from personae.api.completions import GivenPrompt, encoded_prompts, given_prompts
from personae.api.embeddings.wire import PromptFields, PromptUsage
from personae.api.exchange import Exchange
from personae.api.generation import Job
from personae.api.output_parser import TextStyle
from personae.api.params import answer_length, kept_of_prompt, too_many_tokens
from personae.api.wire.schema import CompletionRequest
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, TokenLogprobs
from personae.engine.tokens import Tokenizer
from personae.errors import RequestError

MOST_INPUTS = 2048
WINDOW, WINDOW_TOKENS = 128, 2**16
"""What goes to the engine at a time. Its thread reads a message at once: for 512 prompts of 2,000 tokens that
is 40 ms or more, in which nobody gets a token."""
_PLAIN = TextStyle()


class Outcome(Choice):
    """What a prompt's last step leaves: its vector, and the log-probabilities of the next token."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        super().__init__(index, tokenizer, _PLAIN, prompt=prompt, answers=False)
        self.vector = b""
        self.next: TokenLogprobs | None = None

    def take(self, delta: Delta) -> Part:
        """See Choice."""
        if delta.embedding is not None:
            self.vector = delta.embedding
        if delta.logprobs:
            self.next = delta.logprobs[0]
        return super().take(delta)


class Outcomes(NamedTuple):
    """The results of a request's prompts, in order, and its id and time."""

    id: str
    created: int
    outcomes: list[Outcome]
    usage: PromptUsage


def as_completion(body: PromptFields, prompt: str | list[str | int | list[int]] = "") -> CompletionRequest:
    """The request in the form in which prompts are encoded."""
    return CompletionRequest(
        prompt=prompt,
        model=body.model,
        adapters=body.adapters,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        cache_salt=body.cache_salt,
        priority=body.priority,
        timeout=body.timeout,
        user=body.user,
    )


async def encoded(exchange: Exchange, asked: CompletionRequest, field: str) -> list[GivenPrompt]:
    """The prompts' ids. Raises RequestError, which names the `field` that they came from."""
    limit = exchange.client.max_model_len
    most = kept_of_prompt(asked.truncate_prompt_tokens, answer=1, limit=limit)
    with called(field):
        given = asked.prompt
        if isinstance(given, list) and given and isinstance(given[0], int):
            if len(given) >= limit and most is None:
                raise too_many_tokens(limit, "prompt")
        elif isinstance(given, list) and len(given) > MOST_INPUTS:
            raise RequestError(f"`prompt` may have at most {MOST_INPUTS} entries.", param="prompt")
        texts, ids = given_prompts(given)
        prompts = await exchange.prepared(
            lambda brief: encoded_prompts(exchange, asked, texts, ids, most, brief)
        )
        for prompt in prompts:
            answer_length(1, prompt=len(prompt.tokens), limit=limit, param="", prompt_param=prompt.name)
        return prompts


@contextmanager
def called(field: str) -> Iterator[None]:
    """Errors about `prompt` inside the block name the client's field."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("prompt"):
            error.message = error.message.replace("`prompt", f"`{field}")
            error.param = field + error.param.removeprefix("prompt")
        raise


async def answered(
    exchange: Exchange,
    receive: Receive,
    asked: CompletionRequest,
    model: ModelCard,
    prompts: Sequence[GivenPrompt],
    params: SamplingParams,
    *,
    prefix: str,
    field: str,
    seen: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcomes:
    """Compute the prompts, as many at a time as a request may have sequences. Calls `seen` with the first.

    Raises what Job.run raises.
    """
    tokenizer = exchange.client.tokenizer
    outcomes = [Outcome(index, tokenizer, prompt.tokens) for index, prompt in enumerate(prompts)]
    first: Job | None = None
    for start, end in windows(prompts, min(WINDOW, exchange.settings.max_sequences)):
        job = Job.begin(exchange, prefix, model, asked)
        first = first or job
        if exchange.background:
            job.deadline = math.inf  # the whole request has one
        for outcome, prompt in zip(outcomes[start:end], prompts[start:end], strict=True):
            with called(field):
                job.add(prompt.tokens, params, None, [outcome], prompt_param=prompt.name)
        await job.gather(receive)
        if start == 0:
            seen(outcomes[0])
    assert first is not None, "there is at least one prompt"
    count = sum(len(prompt.tokens) for prompt in prompts)
    return Outcomes(first.id, first.created, outcomes, PromptUsage(count, count))


def windows(prompts: Sequence[GivenPrompt], most: int) -> Iterator[tuple[int, int]]:
    """Where parts of the prompts begin and end. Each has at most `most` prompts and `WINDOW_TOKENS` tokens,
    or one prompt."""
    start = tokens = 0
    for place, prompt in enumerate(prompts):
        if place > start and (place - start == most or tokens + len(prompt.tokens) > WINDOW_TOKENS):
            yield start, place
            start, tokens = place, 0
        tokens += len(prompt.tokens)
    yield start, len(prompts)
