from collections.abc import Iterator

import pytest
from dialect_fixtures import address, app, engine, fresh  # noqa: F401  # pytest finds them here
from openai import OpenAI
from patience import PATIENCE


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
