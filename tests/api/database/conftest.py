"""A PostgreSQL server for these tests, and servers' data directories that share a database of its."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from postgres import PostgresServer, postgres_server

from personae.api.tenants.data import DataDir

Open = Callable[[str], DataDir]


@pytest.fixture(scope="package")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture
def opened(url: str, tmp_path: Path) -> Iterator[Open]:
    """Opens the data directory of another server with the same database."""
    with ExitStack() as stack:

        def one_more(name: str) -> DataDir:
            data = DataDir(tmp_path / name, url)
            stack.callback(data.close)
            return data

        yield one_more
