from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette

from personae.api.app import create_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests by the virtual clock: it would take the time that a thread works for nothing to do, and jump
    over deadlines. A short prompt's template goes to a thread, too, when the machine is busy."""

    async def inline(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(anyio.to_thread, "run_sync", inline)
