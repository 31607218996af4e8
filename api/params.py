"""From request fields to sampling parameters. Every range is checked here, against the model that answers."""

import secrets
from typing import Protocol, TypeVar

import msgspec

from personae.api.exclusion import Exclusions
from personae.api.output_parser import TextStyle
from personae.api.settings import ApiSettings
from personae.api.wire.answers import SamplingDefaults
from personae.api.wire.schema import SamplingFields
from personae.engine.generation_config import GenerationDefaults
from personae.engine.params import GREEDY_BELOW, SamplingParams
from personae.errors import ContextLengthExceeded, RequestError

T = TypeVar("T")
N = TypeVar("N", int, float)

_MAX_STOP_LENGTH = 1024
_MAX_LIST = 1024
_LEAST_PENALTY = 0.01  # logits are divided by it, possibly in 16 bits
_MAX_LOGPROB_TOKENS = 128
_MASK64 = 2**64 - 1


class ModelLimits(Protocol):
    """What the ranges of a request's fields depend on."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """The exclusive upper bound of token ids."""


def sampling_defaults(model: GenerationDefaults, *, plain: bool = True) -> SamplingDefaults:
    """What a request is sampled with that does not say: as the model's makers recommend, or plainly.
    `plain` is an answer of the base in a conversation, without tools, that nothing binds."""
    usual = _pick(model.plain_repetition_penalty if plain else None, 1.0)
    return SamplingDefaults(
        temperature=_pick(model.temperature, 1.0),
        top_p=_pick(model.top_p, 1.0),
        top_k=_pick(model.top_k, 0),
        min_p=_pick(model.min_p, 0.0),
        repetition_penalty=_pick(model.repetition_penalty, usual),
    )


def sampling_params(
    request: SamplingFields,
    *,
    limits: ModelLimits,
    settings: ApiSettings,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    left_out: Exclusions,
    plain: bool,
    prediction: tuple[int, ...] = (),
) -> SamplingParams:
    """The parameters of a request's first sequence; `plain` as for `sampling_defaults`.

    Raises RequestError naming the field that is out of range.
    """
    vocab = limits.vocab_size
    defaults = sampling_defaults(settings.defaults, plain=plain)
    temperature = _between("temperature", _pick(request.temperature, defaults.temperature), 0.0, 2.0)
    top_p = _pick(request.top_p, defaults.top_p)
    if not 0.0 < top_p <= 1.0:
        raise _out_of_range("top_p", "over 0 and at most 1", top_p)
    penalty = _pick(request.repetition_penalty, defaults.repetition_penalty)
    penalty = _between("repetition_penalty", penalty, _LEAST_PENALTY, 10.0)
    top_k = _pick(request.top_k, defaults.top_k)
    if top_k < -1:
        raise _out_of_range("top_k", "0 or -1 (both: off) or positive", top_k)
    min_tokens = _between("min_tokens", request.min_tokens or 0, 0, max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=_seed(settings.seed if request.seed is None else request.seed),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=min(max(top_k, 0), vocab),
        min_p=_between("min_p", _pick(request.min_p, defaults.min_p), 0.0, 1.0),
        presence_penalty=_between("presence_penalty", request.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=_between("frequency_penalty", request.frequency_penalty or 0.0, -2.0, 2.0),
        repetition_penalty=penalty,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab),
        min_tokens=int(min_tokens),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab),
        ignore_eos=bool(request.ignore_eos),
        allowed_tokens=left_out.allowed,
        bad_words_token_ids=left_out.bad_words,
        logprobs=logprobs,
        logprob_tokens=logprob_tokens(request, vocab, logprobs=logprobs is not None),
        prompt_logprobs=prompt_logprobs,
        jump_forward=settings.jump_forward if request.jump_forward is None else request.jump_forward,
        speculate=request.speculate is not False,
        prediction=prediction,
    )


def sibling(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of `n`: the same except for the seed. Choice 0 keeps the request's
    seed.

    The seeds of the others are SplitMix64's outputs for it (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014), shifted into 63 bits.
    """
    if index == 0:
        return params
    mixed = (params.seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return msgspec.structs.replace(params, seed=(mixed ^ (mixed >> 31)) >> 1)


def answer_length(asked: int | None, *, prompt: int, limit: int, param: str, prompt_param: str) -> int:
    """The number of tokens that an answer may have: as many as requested, or all that are left of the
    context.

    Raises ContextLengthExceeded if prompt and answer do not fit, RequestError if `asked` is below 1.
    """
    if asked is not None and asked < 1:
        raise _out_of_range(param, "at least 1", asked)
    # Wording of OpenAI and vLLM, by which clients (LiteLLM, inspect-ai) know what to cut or fall back to.
    longest = f"This model's maximum context length is {limit} tokens"
    if prompt >= limit:
        error = ContextLengthExceeded(
            f"{longest}; the prompt has {prompt}, and the answer needs one.", param=prompt_param
        )
        error.limit, error.prompt = limit, prompt
        raise error
    if asked is not None and prompt + asked > limit:
        error = ContextLengthExceeded(
            f"{longest}; the prompt has {prompt} and `{param}` asks for {shown(asked)} more, "
            f"where {limit - prompt} are left.",
            param=param,
        )
        error.limit, error.prompt, error.asked = limit, prompt, asked
        raise error
    return asked if asked is not None else limit - prompt


def too_many_tokens(limit: int, prompt_param: str) -> ContextLengthExceeded:
    """The error for a prompt that is far over the limit, and was not counted exactly."""
    error = ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens; the prompt has more.", param=prompt_param
    )
    error.limit = limit
    return error


def check_prompt_logprobs(entries: int, name: str, settings: ApiSettings) -> None:
    """Raises RequestError if there would be too many alternatives over all tokens of all prompts and
    choices."""
    if entries > settings.max_prompt_logprobs:
        raise RequestError(
            f"`{name}` times the prompts' tokens is {entries} log-probabilities with those of the tokens "
            f"themselves, over the limit of {settings.max_prompt_logprobs} a request; ask for fewer, or send "
            "fewer prompts at a time.",
            param=name,
            code="out_of_range",
        )


def kept_of_prompt(asked: int | None, *, answer: int, limit: int) -> int | None:
    """How many of a prompt's tokens are kept, the last ones, by `truncate_prompt_tokens`. None for all.

    `answer` tokens must fit in addition. Raises RequestError.
    """
    if asked is None:
        return None
    if asked != -1 and not 1 <= asked <= limit:
        raise _out_of_range("truncate_prompt_tokens", f"-1 (what fits) or from 1 to {limit}", asked)
    return max(limit - answer, 1) if asked == -1 else asked


def choices_of(n: int | None, settings: ApiSettings, prompts: int = 1) -> int:
    """`n`, checked. Raises RequestError."""
    count = int(_between("n", _pick(n, 1), 1, settings.max_n))
    if count * prompts > settings.max_sequences:
        raise RequestError(
            f"{prompts} prompts times `n` {count} is over the limit of {settings.max_sequences} sequences.",
            param="prompt",
        )
    return count


def text_style(request: SamplingFields, settings: ApiSettings) -> TextStyle:
    """How tokens become text. Raises RequestError."""
    return TextStyle(
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output),
        stop=_stop_strings(request.stop, settings),
    )


def _stop_strings(stop: str | list[str] | None, settings: ApiSettings) -> tuple[str, ...]:
    """`stop` as a tuple, checked. Raises RequestError."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > settings.max_stop:
        raise RequestError(f"`stop` may have at most {settings.max_stop} strings.", param="stop")
    for index, string in enumerate(strings):
        if not 0 < len(string) <= _MAX_STOP_LENGTH:
            name = "stop" if isinstance(stop, str) else f"stop[{index}]"
            raise RequestError(f"`{name}` must have 1 to {_MAX_STOP_LENGTH} characters.", param=name)
    return tuple(strings)


def logprob_count(name: str, asked: int | None, settings: ApiSettings) -> int | None:
    """A number of alternatives, checked; -1 is the most possible. Raises RequestError."""
    if asked == -1:
        return settings.max_logprobs
    return None if asked is None else int(_between(name, asked, 0, settings.max_logprobs))


def logprob_tokens(request: SamplingFields, vocab: int, *, logprobs: bool) -> tuple[int, ...]:
    """`logprob_token_ids`, checked: the tokens to look up instead of the likeliest. Raises RequestError."""
    name, ids = "logprob_token_ids", request.logprob_token_ids or ()
    if not ids:
        return ()
    if not logprobs:
        raise RequestError(f"`{name}` needs `logprobs`.", param=name)
    if len(ids) > _MAX_LOGPROB_TOKENS:
        raise RequestError(f"`{name}` may have at most {_MAX_LOGPROB_TOKENS} ids.", param=name)
    for index, token in enumerate(ids):
        _between(f"{name}[{index}]", token, 0, vocab - 1)
    return tuple(dict.fromkeys(ids))


def asked_tokens(asked: int | None) -> int | None:
    """A `max_tokens`, where -1 is no limit, as in llama.cpp."""
    return None if asked == -1 else asked


def keeps_first(request: SamplingFields) -> bool:
    """Whether a prompt that is too long keeps its beginning. Raises RequestError."""
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise RequestError("`truncation_side` needs `truncate_prompt_tokens`.", param="truncation_side")
    return request.truncation_side == "right"


def _pick(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _between(name: str, value: N, low: N, high: N) -> N:
    if not low <= value <= high:
        raise _out_of_range(name, f"from {low} to {high}", value)
    return value


def _out_of_range(name: str, range: str, value: float) -> RequestError:
    return RequestError(f"`{name}` must be {range}; it is {shown(value)}.", param=name, code="out_of_range")


def shown(value: float) -> str:
    """A number in an error, which a client may have made very long."""
    return str(value) if abs(value) < 1e15 else f"a number of {len(str(value))} characters"


def _seed(asked: int | None) -> int:
    if asked is None:
        return secrets.randbits(63)
    return int(_between("seed", asked, -(2**63), 2**63 - 1))


def _logit_bias(bias: dict[int, float], vocab: int) -> dict[int, float]:
    if len(bias) > _MAX_LIST:
        raise RequestError(f"`logit_bias` may have at most {_MAX_LIST} tokens.", param="logit_bias")
    for token, value in bias.items():
        if not 0 <= token < vocab:
            raise RequestError(
                f"`logit_bias` names token {shown(token)}, which does not exist; "
                f"ids are from 0 to {vocab - 1}.",
                param="logit_bias",
            )
        if not -100.0 <= value <= 100.0:
            raise RequestError(
                f"`logit_bias` must be from -100 to 100; that of token {token} is {shown(value)}.",
                param="logit_bias",
                code="out_of_range",
            )
    return bias


def _stop_token_ids(ids: list[int], vocab: int) -> tuple[int, ...]:
    if len(ids) > _MAX_LIST:
        raise RequestError(f"`stop_token_ids` may have at most {_MAX_LIST} ids.", param="stop_token_ids")
    for index, token in enumerate(ids):
        _between(f"stop_token_ids[{index}]", token, 0, vocab - 1)
    return tuple(ids)


def wants_usage(body: SamplingFields) -> bool:
    """Whether a stream must end with the usage. Raises RequestError for stream options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("`stream_options` needs `stream` to be true.", param="stream_options")
    return bool(body.stream_options.include_usage)


def wants_running_usage(body: SamplingFields) -> bool:
    """Whether every chunk of a stream must have the usage so far."""
    return wants_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)
