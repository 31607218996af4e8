from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from dialect_fixtures import address, app, engine, fresh  # noqa: F401  # pytest finds them here


@pytest.fixture
def client(address: str) -> Iterator[Anthropic]:  # noqa: F811  # that fixture
    with Anthropic(
        base_url=address, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client
