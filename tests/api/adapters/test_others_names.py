"""Nobody learns from any route which names another tenant's adapters have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from uploads import UploadFixture, open_fixture, upload, whole

pytestmark = pytest.mark.anyio
TALK = [{"role": "user", "content": "hi"}]
TAKEN, MADE_UP = "quarterly-report", "nobody-has-this1"  # names of the same length
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", {"model": TAKEN, "messages": TALK}),
    ("POST", "/v1/chat/completions", {"model": TAKEN, "messages": TALK, "stream": True}),
    ("POST", "/v1/chat/completions", {"adapters": [{"name": TAKEN}], "messages": TALK}),
    ("POST", "/v1/chat/completions/check", {"model": TAKEN, "messages": TALK}),
    ("POST", "/v1/completions", {"model": TAKEN, "prompt": "hi"}),
    ("POST", "/v1/messages", {"model": TAKEN, "messages": TALK, "max_tokens": 9}),
    ("POST", "/v1/messages", {"model": TAKEN, "messages": TALK, "max_tokens": 9, "stream": True}),
    ("POST", "/v1/messages/count_tokens", {"model": TAKEN, "messages": TALK}),
    ("POST", "/v1/responses", {"model": TAKEN, "input": "hi"}),
    ("POST", "/v1/embeddings", {"model": TAKEN, "input": "hi"}),
    ("POST", "/v1/score", {"model": TAKEN, "text_1": "a", "text_2": "b"}),
    ("POST", "/v1/rerank", {"model": TAKEN, "query": "a", "documents": ["b"]}),
    ("POST", "/tokenize", {"model": TAKEN, "prompt": "hi"}),
    ("POST", "/detokenize", {"model": TAKEN, "tokens": [1]}),
    ("GET", f"/v1/models/{TAKEN}", None),
    ("GET", f"/v1/adapters/{TAKEN}", None),
    ("DELETE", f"/v1/adapters/{TAKEN}", None),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": TAKEN}),
]


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data") as fixture:
        yield fixture


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda value: str(value)[:40])
async def test_another_tenants_adapter_is_refused_as_a_made_up_one_is(
    fixture: UploadFixture, method: str, path: str, body: Any
) -> None:
    async with fixture.client(fixture.key("ann")) as ann, fixture.client(fixture.key("bob")) as bob:
        assert (await upload(ann, TAKEN, whole())).status_code == 201
        refused = await bob.request(method, path, json=body)
        written = json.loads(json.dumps(body).replace(TAKEN, MADE_UP))
        made_up = await bob.request(method, path.replace(TAKEN, MADE_UP), json=written)
        served = await ann.request(method, path, json=body)
    status = 403 if "unload" in path else 200 if path.endswith("/check") else 404
    assert refused.status_code == made_up.status_code == status, refused.text
    assert served.status_code != 404, "its owner knows the name"

    def content(answer: Any) -> tuple[str, list[str]]:
        ids = [answer.headers[name] for name in ("x-request-id", "request-id") if name in answer.headers]
        text = answer.text.replace(TAKEN, MADE_UP)
        for id in ids:
            text = text.replace(id, "ID")
        return text, sorted(answer.headers)

    assert content(refused) == content(made_up)
