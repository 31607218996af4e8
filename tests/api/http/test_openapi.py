"""The published description: complete, and true of whatever a client may send."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine
from live_server import serving
from schemathesis import GenerationMode
from starlette.routing import Route
from uploads import open_fixture

from personae.api.app import OPERATIONS, create_app
from personae.api.http.openapi import document
from personae.evals import api_fuzz

EXAMPLES = 12  # of valid requests and of invalid ones, for each operation
DOCS = Path(__file__).resolve().parents[3] / "docs"
DESCRIBED = document(OPERATIONS)


@cache
def documentation() -> str:
    """All pages."""
    return "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))


def test_every_route_is_an_operation_with_a_description() -> None:
    routes = []
    for route in create_app(FakeEngine()).routes:
        assert isinstance(route, Route)
        routes += [(method, route.path) for method in (route.methods or set()) - {"HEAD"}]
    assert sorted(routes) == sorted((one.method, one.path) for one in OPERATIONS)
    assert all(one.description for one in OPERATIONS)


@pytest.mark.parametrize("one", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_every_operation_stands_in_the_documentation(one: Any) -> None:
    assert one.path.replace("{id:path}", "{id}") in documentation()


@pytest.mark.anyio
async def test_the_server_publishes_the_description() -> None:
    async with asgi.client(create_app(FakeEngine())) as client:
        response = await client.get("/openapi.json")
        assert response.json() == json.loads(json.dumps(DESCRIBED))
        assert response.headers["content-type"] == "application/json"


def test_schemas_are_named_without_the_modules_that_they_lie_in() -> None:
    assert all(name.isidentifier() for name in DESCRIBED["components"]["schemas"])


def test_operations_of_one_kind_have_one_tag() -> None:
    tags = {tag for methods in DESCRIBED["paths"].values() for one in methods.values() for tag in one["tags"]}
    assert tags == {
        "adapters",
        "batches",
        "chat",
        "completions",
        "eval_reports",
        "files",
        "keys",
        "account",
        "adapter_aliases",
        "embeddings",
        "rerank",
        "score",
        "sessions",
        "messages",
        "models",
        "replicas",
        "conversations",
        "responses",
        "server",
        "stats",
        "tenants",
        "usage",
    }


def test_probes_and_the_console_need_no_key_and_everything_else_says_that_it_does() -> None:
    for path, methods in DESCRIBED["paths"].items():
        for described in methods.values():
            probe = path in ("/health", "/ready", "/ping", "/", "/console", "/docs", "/console/{name}")
            assert (described.get("security") == []) == probe
            assert ("401" in described["responses"]) != probe


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_fixture(tmp_path_factory.mktemp("data")) as fixture, serving(fixture.app) as address:
        yield address


@pytest.mark.parametrize("mode", api_fuzz.MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("operation", list(api_fuzz.operations(DESCRIBED)), ids=lambda one: one.label)
def test_no_request_brings_a_5xx_or_an_answer_that_is_not_described(
    operation: api_fuzz.Described, mode: GenerationMode, address: str
) -> None:
    statuses = api_fuzz.ask(operation, mode, address, model="base", examples=EXAMPLES)
    if mode is GenerationMode.POSITIVE and operation.path in (
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
    ):
        assert statuses[200], f"valid requests should be served, not only {statuses}"


def test_every_answer_may_say_that_its_most_tokens_were_changed() -> None:
    for path in ("/v1/messages", "/v1/responses", "/v1/chat/completions"):
        headers = DESCRIBED["paths"][path]["post"]["responses"]["200"]["headers"]
        assert headers["x-personae-max-tokens"]["schema"] == {"type": "integer"}
