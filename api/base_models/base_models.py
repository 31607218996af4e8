"""Several base models behind one address: which of them answers, and their engines."""

import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import msgspec

from personae.actors.client import ModelCard
from personae.actors.on_demand import OnDemandEngine, SharedMemory
from personae.api.adapters.records import AdapterRecord
from personae.api.adapters.registry import Registry
from personae.api.answering import find_model
from personae.api.exchange import Exchange
from personae.api.opened import Opened
from personae.api.options import ServeOptions
from personae.api.services import Services
from personae.api.settings import serve_settings
from personae.errors import DeadlineExceeded, Overloaded, PersonaeError, RequestError
from personae.lora.peft_names import CONFIG_FILE

_log = logging.getLogger("personae.engine")


class _AdapterConfig(msgspec.Struct):
    """What of an adapter's config says which base it is for."""

    base_model_name_or_path: str | None = None


@dataclass(eq=False)
class BaseModel:
    """One of several bases. `source` is the model as it was given. `services` are those of its requests,
    known after its first start; `max_model_len` is the longest sequence until then, in tokens. `created` is
    Unix time in seconds."""

    name: str
    source: str
    options: ServeOptions
    engine: OnDemandEngine[Opened]
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))
    services: Services | None = None
    starting: anyio.Lock = field(default_factory=anyio.Lock)

    def is_for(self, named: str) -> bool:
        """Whether an adapter that was trained for the model `named` is for this base: by its whole name, or
        by the last part of its path."""
        known = {self.name, self.source}
        return named in known or Path(named).name in {Path(each.partition("@")[0]).name for each in known}


class BaseModels:
    """The bases of a server by their names, the first of which answers where no other is meant. `registry`
    has the adapters of all of them."""

    def __init__(self, bases: list[BaseModel], memory: SharedMemory) -> None:
        self.memory = memory
        self._bases = {base.name: base for base in bases}
        self.first = bases[0]
        self.registry: Registry | None = None

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._bases.values())

    def begin(self, services: Services) -> None:
        """Take the services of the first base, which has been started."""
        self.first.services, self.registry = services, services.registry
        if self.registry is not None:
            self.registry.reserve(self._bases)

    def base_of(self, tenant: str, name: str) -> BaseModel:
        """The base that answers requests for this model, adapter or alias; the first for a name that nobody
        knows, and which is refused there."""
        own = self._own(tenant, name)
        if own is None and self.registry is not None:
            if (alias := self.registry.aliases.find(tenant, name)) is not None:
                name = next(iter(alias.targets))
                own = self._own(tenant, name)
            if own is None and (record := self.registry.find(tenant, name)) is not None:
                own = self._bases.get(record.base_model)
        return own or self.first

    def has(self, tenant: str, name: str) -> bool:
        """Whether a base has that name, or began with an adapter of it."""
        return self._own(tenant, name) is not None

    def check_alike(self, tenant: str, targets: Iterable[str]) -> None:
        """Raises RequestError unless all targets of an alias have the same base: their requests would be
        written for different models."""
        first, *others = targets
        base = self.base_of(tenant, first)
        for target in others:
            if (other := self.base_of(tenant, target)) is not base:
                raise RequestError(
                    f"`targets` must have one base: `{first[:80]}` has `{base.name}`, `{target[:80]}` has "
                    f"`{other.name}`.",
                    param="targets",
                )

    def _own(self, tenant: str, name: str) -> BaseModel | None:
        """The base with that name, or that began with an adapter of that name."""
        if name in self._bases:
            return self._bases[name]
        loaded = (base for base in self if base.services is not None)
        return next((base for base in loaded if name in base.engine.models(tenant)), None)

    async def answered_by(self, exchange: Exchange, base: BaseModel) -> Exchange:
        """The exchange with this base's services. Waits until its engine has started for the first time.
        Raises Overloaded."""
        if base.services is None:
            try:
                with anyio.fail_after(max(exchange.deadline(None) - anyio.current_time(), 0)):
                    await self._load(exchange, base)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"The model `{base.name}` did not start within the request's timeout."
                ) from None
        assert base.services is not None
        return exchange.with_services(base.services)

    async def _load(self, exchange: Exchange, base: BaseModel) -> None:
        async with base.starting:
            if base.services is None:
                async with base.engine.using() as opened:
                    settings = serve_settings(base.options, opened)
                    services = exchange.services.of_base(base.engine, settings)
                    if self.registry is not None and opened.bounds is not None:
                        names = base.engine.models(exchange.caller.tenant)
                        self.registry.add_base(base.name, names, opened.bounds)
                    exchange.services.metrics.add_engine(base.engine, base.name)
                    base.services = services

    def check_name(self, name: str) -> None:
        """Raises RequestError unless a base has that name."""
        if name not in self._bases:
            known = ", ".join(f"`{each}`" for each in self._bases)
            raise RequestError(f"The base models here are {known}.", param="base_model")

    async def of_upload(self, exchange: Exchange, named: str | None, folder: Path) -> BaseModel:
        """The base of an adapter whose files are in `folder`: the one that is named, else the one that its
        config names, else the first. It has been started once then. Raises Overloaded."""
        base = self._bases[named] if named is not None else self._trained_for(folder)
        await self.answered_by(exchange, base)
        return base

    def _trained_for(self, folder: Path) -> BaseModel:
        try:
            config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_AdapterConfig)
        except (OSError, msgspec.MsgspecError):
            return self.first  # whose check says what is wrong
        named = config.base_model_name_or_path
        return next((base for base in self if named and base.is_for(named)), self.first)

    def models(self, exchange: Exchange) -> list[tuple[ModelCard, "BaseModel"]]:
        """Every name that the caller may use, with its base: each base, the adapters it began with, then the
        uploaded ones and the aliases."""
        tenant = exchange.caller.tenant
        found: dict[str, tuple[ModelCard, BaseModel]] = {}
        for base in self:
            cards = base.engine.models(tenant) if base.services is not None else {}
            for card in cards.values() or [ModelCard(base.name, None, base.created)]:
                found.setdefault(card.name, (card, base))
        for record in self._records(tenant):
            found.setdefault(record.name, (record.card(), self._bases[record.base_model]))
        for alias in self.registry.aliases.list(tenant) if self.registry is not None else ():
            base = self.base_of(tenant, alias.name)
            found.setdefault(alias.name, (ModelCard(alias.name, "", alias.created, base.name), base))
        return list(found.values())

    def model(self, exchange: Exchange, name: str) -> tuple[ModelCard, BaseModel]:
        """What that name stands for, and its base. Raises NotFound."""
        tenant = exchange.caller.tenant
        base = self.base_of(tenant, name)
        if base.services is not None:
            return find_model(exchange.with_services(base.services), name), base
        found = next((card for card, _ in self.models(exchange) if card.name == name), None)
        if found is None and self.registry is not None:  # one of the versions
            record = self.registry.find(tenant, name)
            found = None if record is None else record.card(name)
        return (found, base) if found is not None else (find_model(exchange, name), self.first)

    def _records(self, tenant: str) -> Iterator[AdapterRecord]:
        for record in self.registry.list(tenant) if self.registry is not None else ():
            if record.base_model in self._bases:
                yield record

    def end_all(self, error: PersonaeError) -> None:
        """End every stream with an error."""
        for base in self:
            if base.engine.running is not None:
                base.engine.running.end_all(error)

    def describe(self) -> str:
        """What every actor of the engines that run is doing."""
        running = [(base.name, base.engine.running) for base in self]
        return "\n".join(f"{name}:\n{each.describe()}" for name, each in running if each is not None)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[Opened]:
        """The first base's engine. Raises the error with which it does not start."""
        try:
            async with self.first.engine.using() as first:
                yield first
        except Overloaded as refusal:
            raise refusal.__cause__ or refusal from None

    @asynccontextmanager
    async def opened(self, about: str) -> AsyncIterator[Opened]:
        """Run the engines, start the first one, and yield what the API needs of it. Raises the error with
        which it does not start."""
        failure: PersonaeError | None = None
        async with anyio.create_task_group() as tasks:
            for base in self:
                tasks.start_soon(base.engine.run)
            try:
                async with self._started() as first:
                    opened = replace(
                        first, client=self.first.engine, lost=anyio.sleep_forever, end_all=self.end_all
                    )
                yield replace(opened, describe=self.describe, scaler=None, about=about, base_models=self)
            except PersonaeError as error:
                failure = error  # not in a group: the exit code depends on it
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
