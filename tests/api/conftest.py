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
