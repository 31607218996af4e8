from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fake_engine import FakeEngine
from fake_hub import FakeHub
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub at the real one's address, and an empty cache."""
    with FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub
