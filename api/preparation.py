"""What chat completions and completions have in common until their jobs exist: what answers, how long an
answer may be, which log-probabilities there are room for."""

from dataclasses import dataclass

from personae.actors.client import ModelCard
from personae.api.adapters.defaults import NO_DEFAULTS
from personae.api.answering import answering, chosen_model, with_defaults
from personae.api.defaults import fill
from personae.api.dialect import Dialect
from personae.api.exchange import Exchange
from personae.api.output_parser import TextStyle
from personae.api.params import (
    answer_length,
    check_prompt_logprobs,
    kept_of_prompt,
    logprob_count,
    text_style,
    wants_usage,
)
from personae.api.wire.schema import SamplingFields, refuse_unserved
from personae.errors import RequestError

_BYTES_OF_LOGPROB = 64
"""For one alternative of a token: the bytes in the answer, and those that it takes before."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A request to a model, whose defaults are filled in. `prompt_logprobs` is the number of alternatives for
    each token of the prompt, None for none."""

    exchange: Exchange
    model: ModelCard
    style: TextStyle
    prompt_logprobs: int | None

    @property
    def default_length(self) -> int | None:
        """The most tokens of an answer by the adapter's defaults."""
        length: int | None = self.exchange.defaults.get("max_tokens")
        return length

    def kept(self, body: SamplingFields, asked: int | None) -> int | None:
        """How many tokens of a prompt are kept if an answer may have `asked` tokens, None for all. Raises
        RequestError."""
        limit = self.exchange.client.max_model_len
        return kept_of_prompt(body.truncate_prompt_tokens, answer=asked or 1, limit=limit)

    def answer_length(
        self,
        asked: int | None,
        default: int | None,
        prompt: int,
        *,
        dialect: Dialect,
        param: str,
        prompt_param: str,
    ) -> int:
        """The number of tokens that an answer to `prompt` tokens may have: `asked` by the client, else the
        `default`, which shrinks to what fits, else all that are left of the context. Raises
        ContextLengthExceeded, and RequestError if `asked` is below 1."""
        limit, overflow = self.exchange.client.max_model_len, self.exchange.settings.max_tokens_overflow
        if asked is None and default is not None:
            asked = min(default, max(limit - prompt, 1))
        elif dialect.clamps if overflow is None else overflow == "clamp":
            asked = self.exchange.shrunk(asked, limit - prompt)
        return answer_length(asked, prompt=prompt, limit=limit, param=param, prompt_param=prompt_param)

    def keep_prompt_logprobs(self, alternatives: int | None, tokens: int, name: str) -> None:
        """Count the memory of so many `alternatives` for each of the prompts' tokens. Raises RequestError
        that names the field for too many, and RateLimited."""
        if alternatives is not None:
            entries = tokens * (alternatives + 1)
            check_prompt_logprobs(entries, name, self.exchange.settings)
            self.exchange.keep(_BYTES_OF_LOGPROB * entries)


async def begin(exchange: Exchange, body: SamplingFields) -> Preparation:
    """Find what answers the request, fill in its defaults, and check what needs no prompt. Raises
    RequestError, and what `answering` does."""
    refuse_unserved(body)
    exchange = await answering(exchange, body.model)
    model = chosen_model(exchange, body)
    exchange = await with_defaults(exchange, model)
    if exchange.defaults is not NO_DEFAULTS:
        fill(body, exchange.defaults)
    wants_usage(body)
    style = text_style(body, exchange.settings)
    alternatives = logprob_count("prompt_logprobs", body.prompt_logprobs, exchange.settings)
    if alternatives is not None and body.stream:
        raise RequestError("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")
    return Preparation(exchange, model, style, alternatives)
