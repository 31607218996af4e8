"""Fixtures of dialects' tests: an app over a fake engine, and a server of it."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE

from personae.api.app import create_app


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    """For one test: an app belongs to the first event loop on which something has to wait."""
    return create_app(engine)


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as address:
        yield address


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.answer, engine.burst = "Hello, world!", 1
    engine.refuse = engine.refuse_late = engine.fail_after = None
    engine.submitted.clear()
