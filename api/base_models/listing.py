"""What `/v1/models` shows of several base models."""

from collections.abc import Iterator

from personae.actors.client import ModelCard
from personae.api.adapters.records import AdapterRecord
from personae.api.answering import find_model
from personae.api.base_models.base_models import BaseModel, BaseModels
from personae.api.exchange import Exchange


def models_of(exchange: Exchange, bases: BaseModels) -> list[tuple[ModelCard, BaseModel]]:
    """Every name that the caller may use, with its base: each base, the adapters it began with, then the
    uploaded ones and the aliases."""
    tenant = exchange.caller.tenant
    found: dict[str, tuple[ModelCard, BaseModel]] = {}
    for base in bases:
        cards = base.engine.models(tenant) if base.services is not None else {}
        for card in cards.values() or [ModelCard(base.name, None, base.created)]:
            found.setdefault(card.name, (card, base))
    for record in _records(bases, tenant):
        found.setdefault(record.name, (record.card(), bases.named(record.base_model)))
    for alias in bases.registry.aliases.list(tenant) if bases.registry is not None else ():
        base = bases.base_of(tenant, alias.name)
        found.setdefault(alias.name, (ModelCard(alias.name, "", alias.created, base.name), base))
    return list(found.values())


def model_of(exchange: Exchange, bases: BaseModels, name: str) -> tuple[ModelCard, BaseModel]:
    """What that name stands for, and its base. Raises NotFound."""
    tenant = exchange.caller.tenant
    base = bases.base_of(tenant, name)
    if base.services is not None:
        return find_model(exchange.with_services(base.services), name), base
    found = next((card for card, _ in models_of(exchange, bases) if card.name == name), None)
    if found is None and bases.registry is not None:  # one of the versions
        record = bases.registry.find(tenant, name)
        found = None if record is None else record.card(name)
    return (found, base) if found is not None else (find_model(exchange, name), bases.first)


def _records(bases: BaseModels, tenant: str) -> Iterator[AdapterRecord]:
    names = {base.name for base in bases}
    for record in bases.registry.list(tenant) if bases.registry is not None else ():
        if record.base_model in names:
            yield record
