from collections.abc import Iterator
from pathlib import Path

import pytest
from dialect_fixtures import address, app, engine, fresh  # noqa: F401  # pytest finds them here
from fake_engine import FakeEngine, byte_tokenizer
from openai import OpenAI
from patience import PATIENCE
from tool_chat import TAGS, TEMPLATE
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.responses.store import ResponseStore


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:  # noqa: F811  # that fixture
    with OpenAI(
        base_url=f"{address}/v1",
        api_key="none",
        max_retries=0,
        timeout=PATIENCE,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path) as fixture:
        fixture.engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
        fixture.app = create_app(fixture.engine, tenants=fixture.tenants, stored=ResponseStore(fixture.data))
        yield fixture
