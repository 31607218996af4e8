from collections.abc import Iterator
from pathlib import Path

import pytest
from dialect_fixtures import address, app, engine, fresh  # noqa: F401  # pytest finds them here
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from tool_chat import TAGS, TEMPLATE
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.responses.store import ResponseStore


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:  # noqa: F811  # that fixture
    with openai_client(address) as client:
        yield client


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path) as fixture:
        fixture.engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
        fixture.app = create_app(fixture.engine, tenants=fixture.tenants, stored=ResponseStore(fixture.data))
        yield fixture


@pytest.fixture
def ann(fixture: UploadFixture) -> Iterator[OpenAI]:
    """The client of a tenant."""
    with serving(fixture.app) as url, openai_client(url, fixture.key("ann")) as client:
        yield client
