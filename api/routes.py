"""The small routes: models, health, version, metrics, tokenize, detokenize."""

from datetime import UTC, datetime

import msgspec
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import personae
from personae.actors.client import EngineStats, ModelCard
from personae.api.adapters.defaults import decode_defaults
from personae.api.answering import answering, find_model, known_models, with_defaults
from personae.api.base_models.base_models import BaseModel
from personae.api.base_models.listing import model_of, models_of
from personae.api.body import read_json
from personae.api.chat import template_kwargs
from personae.api.dialect import CHAT, Dialect
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import Content, operation
from personae.api.params import sampling_defaults
from personae.api.prompt import check_ids, decode_ids, encode_texts, render_chat
from personae.api.respond import encode_json, json_response
from personae.api.templates.sandbox import PromptTooLong
from personae.api.tools import functions_of, shown_tools
from personae.api.wire.answers import Load, Model, ModelList, Status, Text, Tokens, Version
from personae.api.wire.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from personae.engine.generation_config import GenerationDefaults
from personae.engine.prompt_length import TooManyTokens
from personae.errors import Overloaded, RequestError

_CONTEXTS = 8
_LEAST_TOKENS = 2**16
_OF_MESSAGES = (
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "tools",
)
"""Fields of `/tokenize` that say how a conversation becomes a prompt."""


def _model(card: ModelCard, exchange: Exchange, *, whole: bool = False) -> Model:
    defaults = decode_defaults(card.defaults)
    sampling = sampling_defaults(exchange.settings.defaults, plain=card.adapter is None)
    own = {name: value for name in sampling.__struct_fields__ if (value := defaults.get(name)) is not None}
    return Model(
        card.name,
        card.created,
        exchange.client.max_model_len,
        card.parent,
        root=card.parent or (card.name if card.adapter else exchange.base),
        quantization=card.quantization,
        rank=card.rank,
        display_name=card.name,
        created_at=datetime.fromtimestamp(card.created, UTC).isoformat(),
        sampling_defaults=msgspec.structs.replace(sampling, **own),
        defaults=defaults if whole and card.version is not None else UNSET,
    )


def _of_base(card: ModelCard, base: BaseModel, exchange: Exchange, *, whole: bool = False) -> Model:
    """A model of one of several bases. Until a base is loaded, its files' headers say what is known."""
    own = exchange if base.services is None else exchange.with_services(base.services)
    model = _model(card, own, whole=whole)
    model.state, model.root = base.engine.state, card.parent or base.name
    if base.services is None:
        model.max_model_len, model.sampling_defaults = (
            base.max_model_len,
            sampling_defaults(GenerationDefaults()),
        )
    return model


@operation("GET", "/v1/models", answers={200: ModelList})
async def list_models(request: Request) -> Response:
    """List the base, then the adapters."""
    exchange = exchange_of(request)
    if exchange.services.base_models is None:
        return json_response(ModelList([_model(card, exchange) for card in known_models(exchange)]))
    found = models_of(exchange, exchange.services.base_models)
    return json_response(ModelList([_of_base(card, base, exchange) for card, base in found]))


@operation("GET", "/v1/models/{id:path}", answers={200: Model}, refuses=(404,))
async def get_model(request: Request) -> Response:
    """Show the base or an adapter."""
    exchange, id = exchange_of(request), request.path_params["id"]
    if exchange.services.base_models is not None:
        card, base = model_of(exchange, exchange.services.base_models, id)
        return json_response(_of_base(_as_asked(card), base, exchange, whole=True))
    return json_response(_model(_as_asked(find_model(exchange, id)), exchange, whole=True))


def _as_asked(card: ModelCard) -> ModelCard:
    """The model by the name of the alias that chose it, if one did."""
    return card if card.alias is None else msgspec.structs.replace(card, name=card.alias)


@operation("GET", "/health", answers={200: Status})
async def health(request: Request) -> Response:
    """Say that the process is alive."""
    return json_response(Status("ok", _cold_start(exchange_of(request).client.stats())))


def _cold_start(stats: EngineStats) -> float | None:
    return stats.cold_start_seconds or None if not stats.replicas else None


@operation("GET", "/ready", answers={200: Status})
async def ready(request: Request) -> Response:
    """Say whether the server can answer requests now; 503 until then."""
    return _readiness(request)


def _readiness(request: Request) -> Response:
    stats = exchange_of(request).client.stats()
    if not stats.ready:
        raise Overloaded("The engine is not ready.", code="not_ready")
    return json_response(Status("ready", _cold_start(stats)))


@operation("GET", "/ping", answers={200: Status})
async def ping(request: Request) -> Response:
    """The same as /ready, at the path of vLLM and SageMaker."""
    return _readiness(request)


@operation("POST", "/ping", answers={200: Status})
async def post_ping(request: Request) -> Response:
    """The same as /ready, at the path of vLLM and SageMaker."""
    return _readiness(request)


@operation("GET", "/load", answers={200: Load})
async def load(request: Request) -> Response:
    """Count the requests in progress, of all tenants."""
    return json_response(Load(exchange_of(request).services.metrics.in_flight))


@operation("GET", "/version", answers={200: Version})
async def version(request: Request) -> Response:
    """Show the server's version."""
    return json_response(Version(personae.__version__))


@operation("GET", "/metrics", answers={200: Content("text/plain")}, admin=True)
async def metrics(request: Request) -> Response:
    """Show the metrics in Prometheus's text format; for admins, because they name every tenant's adapters."""
    exchange = exchange_of(request)
    return Response(exchange.services.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@operation("POST", "/tokenize", body=TokenizeRequest, answers={200: Tokens}, refuses=(404,))
async def tokenize(request: Request) -> Response:
    """Show the ids of a prompt or a conversation; nothing is generated."""
    exchange = exchange_of(request)
    body = await read_json(request, TokenizeRequest, exchange)
    exchange = await answering(exchange, body.model)
    if body.model is not None:
        exchange = await with_defaults(exchange, find_model(exchange, body.model))
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either `prompt` or `messages`.", param="prompt")
    if body.messages is None:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise RequestError(f"`{name}` belongs to `messages`, not to `prompt`.", param=name)
    answer = await exchange.prepared(lambda brief: _tokenized(exchange, body, brief))
    return Response(answer, media_type="application/json")


def _tokenized(exchange: Exchange, body: TokenizeRequest, brief: bool) -> bytes:
    """The answer, encoded."""
    ids = prompt_ids(exchange, body, brief)
    tokenizer = exchange.client.tokenizer
    strings = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return encode_json(Tokens(len(ids), exchange.client.max_model_len, ids, strings))


def prompt_ids(exchange: Exchange, body: TokenizeRequest, brief: bool, dialect: Dialect = CHAT) -> list[int]:
    """The ids of a text, or of a conversation in `dialect`. Raises RequestError if it is far longer than any
    prompt."""
    most = _most_tokens(exchange)
    try:
        if body.messages is not None:
            functions_of(body.tools, dialect=dialect)
            text = render_chat(
                exchange,
                body.messages,
                brief=brief,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                kwargs=body.chat_template_kwargs,
                tools=shown_tools(body.tools),
                chat_template=body.chat_template,
                characters=exchange.client.tokenizer.longest_text(most),
            )
            special = bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        (ids,) = encode_texts(exchange, [text], add_special_tokens=special, brief=brief, limit=most)
    except (TooManyTokens, PromptTooLong):
        raise _too_long("prompt" if body.messages is None else "messages", most) from None
    if len(ids) > most:
        raise _too_long("prompt" if body.messages is None else "messages", most)
    return ids


def prompt_count(exchange: Exchange, asked: ChatRequest, brief: bool, dialect: Dialect) -> int:
    """The number of tokens in the prompt of a chat completion. Raises what `prompt_ids` does."""
    body = TokenizeRequest(
        messages=asked.messages,
        tools=asked.tools,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=template_kwargs(exchange, asked),
    )
    return len(prompt_ids(exchange, body, brief, dialect))


@operation("POST", "/detokenize", body=DetokenizeRequest, answers={200: Text}, refuses=(404,))
async def detokenize(request: Request) -> Response:
    """Show the text of token ids, including special tokens."""
    exchange = exchange_of(request)
    body = await read_json(request, DetokenizeRequest, exchange)
    exchange = await answering(exchange, body.model)
    if body.model is not None:
        find_model(exchange, body.model)
    if len(body.tokens) > (most := _most_tokens(exchange)):
        raise _too_long("tokens", most)
    check_ids(exchange, body.tokens, "tokens")
    (text,) = await exchange.prepared(
        lambda brief: decode_ids(exchange, [body.tokens], skip_special_tokens=False, brief=brief)
    )
    return json_response(Text(text))


def _most_tokens(exchange: Exchange) -> int:
    """The most tokens of a text that is not a prompt, but may have to be cut into several."""
    return max(_CONTEXTS * exchange.client.max_model_len, _LEAST_TOKENS)


def _too_long(param: str, most: int) -> RequestError:
    return RequestError(
        f"`{param}` has more than {most} tokens, which is the most that this route takes.",
        param=param,
        code="context_length_exceeded",
    )
