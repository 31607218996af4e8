"""Several base models behind one address: which of them is meant, and their engines."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from personae.actors.on_demand import EngineMemory, OnDemandEngine
from personae.api.adapters.registry import Registry
from personae.api.opened import Opened
from personae.api.options import ServeOptions
from personae.api.services import Services
from personae.errors import Overloaded, PersonaeError, RequestError


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

    def __init__(self, bases: list[BaseModel], memory: EngineMemory) -> None:
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

    def named(self, name: str) -> BaseModel:
        """The base of that name."""
        return self._bases[name]

    def check_name(self, name: str) -> None:
        """Raises RequestError unless a base has that name."""
        if name not in self._bases:
            known = ", ".join(f"`{each}`" for each in self._bases)
            raise RequestError(f"The base models here are {known}.", param="base_model")

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
