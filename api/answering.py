"""What answers a request: the base and the adapter that its `model` names, with the adapter's defaults."""

from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from personae.actors.client import ModelCard
from personae.api.adapters.combined import combined
from personae.api.adapters.defaults import NO_DEFAULTS, RequestDefaults, decode_defaults
from personae.api.adapters.on_request import fetch_requested
from personae.api.base_models.served import answered_by
from personae.api.exchange import Exchange
from personae.api.family import Family
from personae.api.sessions.store import session_key
from personae.api.wire.schema import Sampling
from personae.errors import ModelLoadError, NotFound, RequestError
from personae.grammar.fuzzy_match import nearest

if TYPE_CHECKING:
    from personae.api.adapters.records import AdapterRecord

ADAPTER = "x-personae-adapter"
"""The header with the exact version of the adapter that answers, as `poet@2`."""

_MOST_VARIANTS = 64
_LONGEST_COMPARED, _MOST_COMPARED = 64, 16
"""For an unknown model's name: its characters, and how many names of about that length it is compared
with."""


async def answering(exchange: Exchange, name: str | None) -> Exchange:
    """The exchange with the services of the base that answers requests for the model `name`; None: for the
    default. Waits until that base's engine has started for the first time. A source is fetched, if the tenant
    may do that. Raises Overloaded, and what `fetch_requested` does."""
    if name is not None and "://" in name:
        await fetch_requested(exchange, name)
    bases = exchange.services.base_models
    if bases is None:
        return exchange
    named = name if name is not None else exchange.settings.default_model
    base = bases.first if named is None else bases.base_of(exchange.caller.tenant, named)
    return await answered_by(exchange, base)


def known_models(exchange: Exchange) -> list[ModelCard]:
    """Every name that the caller may use in `model`: the base, adapters of the server's start, and later
    ones."""
    registry, tenant = exchange.services.registry, exchange.caller.tenant
    cards, bases = dict(exchange.client.models(tenant)), exchange.bases
    for record in registry.list(tenant) if registry else ():
        if record.base_model in bases:
            cards.setdefault(record.name, record.card())
    for alias in registry.aliases.list(tenant) if registry else ():
        cards.setdefault(alias.name, ModelCard(alias.name, "", alias.created, exchange.base))
    return list(cards.values())


def chosen_model(exchange: Exchange, body: Sampling) -> ModelCard:
    """What answers the request: `model`, or the base with all of `adapters`. Raises NotFound or
    RequestError."""
    who = _session_key(exchange, body)
    name = body.model if body.model is not None else exchange.settings.default_model or exchange.base
    card = find_model(exchange, name, key=who)
    if not body.adapters:
        if card.version is not None:
            exchange.answer_headers[ADAPTER] = card.version
        return card
    entries = enumerate(body.adapters)
    parts = [
        (find_model(exchange, entry.name, f"adapters[{i}].name", who), entry.weight) for i, entry in entries
    ]
    return combined(card, parts, exchange.settings.max_rank)


def _session_key(exchange: Exchange, body: Sampling) -> str | None:
    """What keeps a session or an end user with the same choice of an alias. None if the request names
    neither."""
    named = (getattr(body, field, None) for field in ("prompt_cache_key", "safety_identifier"))
    session = exchange.headers.session
    key = None if session is None else session_key(session)
    return next((one for one in (key, *named, body.user) if isinstance(one, str) and one), None)


def find_model(exchange: Exchange, name: str, param: str = "model", key: str | None = None) -> ModelCard:
    """The base or the adapter of that name, held until the request has ended; of an alias what it chooses
    for `key`. Raises NotFound."""
    registry, tenant = exchange.services.registry, exchange.caller.tenant
    if name not in exchange.client.models(tenant) and registry is not None:
        alias = registry.aliases.find(tenant, name)
        if alias is not None:
            return msgspec.structs.replace(_card(exchange, alias.choose(key), param), alias=name)
    return _card(exchange, name, param)


def _card(exchange: Exchange, name: str, param: str) -> ModelCard:
    card, registry = exchange.client.models(exchange.caller.tenant).get(name), exchange.services.registry
    if card is None and (record := _uploaded(exchange, name)) is not None and registry is not None:
        exchange.caller.until_done.enter_context(registry.files.hold(record.sha256))
        card = record.card(name)
    if card is None:
        meant = _meant(exchange, name)
        hint = "; /v1/models lists those that do." if meant is None else f". Did you mean `{meant}`?"
        raise NotFound(f"The model `{name[:100]}` does not exist{hint}", param=param, code="model_not_found")
    return card


def _uploaded(exchange: Exchange, name: str) -> "AdapterRecord | None":
    registry = exchange.services.registry
    record = None if registry is None else registry.find(exchange.caller.tenant, name)
    here = record is not None and (record.base_model == exchange.base or record.base_model in exchange.bases)
    return record if here else None


def _meant(exchange: Exchange, name: str) -> str | None:
    """The model that was probably meant: without the prefix that other servers use (`base:poet`,
    `owner/poet`), in lower case, or with a similar spelling. Only some names are compared, because there
    may be very many."""
    last = name.rpartition("/")[2].rpartition(":")[2].strip()
    registry, known = exchange.services.registry, exchange.client.models(exchange.caller.tenant)
    guesses = (last, last.lower())
    found = next((one for one in guesses if one in known or _uploaded(exchange, one) is not None), None)
    if found is not None or len(name) > _LONGEST_COMPARED:
        return found
    uploaded = (one.name for one in registry.list(exchange.caller.tenant)) if registry else ()
    similar = (one for one in chain(known, uploaded) if abs(len(one) - len(name)) <= 2)
    return nearest(name, islice(similar, _MOST_COMPARED))


async def with_defaults(exchange: Exchange, card: ModelCard) -> Exchange:
    """The exchange for a request that this model answers: with its defaults, and its way to chat."""
    defaults = decode_defaults(card.defaults)
    return exchange if defaults == NO_DEFAULTS else await defaulting(exchange, defaults)


async def defaulting(exchange: Exchange, defaults: RequestDefaults) -> Exchange:
    """The exchange with these defaults. Raises RequestError for a format or a template that is invalid."""
    key = tuple(map(defaults.get, ("tool_format", "reasoning_format", "chat_template")))
    variant, variants = exchange.variant, exchange.family.variants
    if any(key):
        if key not in variants:
            made = await exchange.off_loop(partial(_variant, exchange, *key))
            if len(variants) >= _MOST_VARIANTS:
                variants.clear()
            variants[key] = made
        variant = variants[key]
    return replace(exchange, defaults=defaults, variant=variant)


def _variant(exchange: Exchange, tools: str | None, reasoning: str | None, template: str | None) -> Family:
    settings = exchange.settings
    try:
        family = Family.of(
            exchange.client.tokenizer, tools or settings.tool_format, reasoning or settings.reasoning_format
        )
    except ModelLoadError as error:
        raise RequestError(error.message, param="tool_format" if tools else "reasoning_format") from None
    return family if template is None else family.with_template(template)
