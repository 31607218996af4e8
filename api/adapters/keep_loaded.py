"""Tells the engines which adapters stay on the device."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from personae.actors.client import EngineClient
from personae.actors.kit.background import background_tasks, repeat
from personae.api.adapters.registry import Registry
from personae.api.services import Services

CHECK_SECONDS = 1.0  # another server with the same database may change them, too


class KeptLoaded:
    """Compares what the registry says with what the engines were told, once a second."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loaded: dict[str, tuple[str, ...]] = {}  # by base

    def check(self) -> None:
        """Tell each engine, if something has changed for it."""
        registry = self._services.registry
        if registry is None:
            return
        for base, client in self._engines(registry):
            digests = registry.kept_loaded(base)
            if digests != self._loaded.get(base, ()):
                self._loaded[base] = digests
                client.keep_loaded(digests)

    def _engines(self, registry: Registry) -> list[tuple[str, EngineClient]]:
        if self._services.base_models is None:
            return [(registry.base, self._services.client)]
        return [(base.name, base.engine) for base in self._services.base_models]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check regularly while the block runs."""
        async with background_tasks() as tasks:
            tasks.start_soon(repeat, CHECK_SECONDS, self.check, "it is not known which adapters stay loaded")
            yield
