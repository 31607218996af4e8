"""Responses whose clients do not wait for them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from patience import eventually
from tool_chat import TAGS, TEMPLATE
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.responses import background
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.store import ResponseStore

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "base", "input": "hi", "background": True}


def make_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096, **fields)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path) as fixture:
        fixture.engine = make_engine()
        yield fixture


@pytest.fixture
def client(fixture: UploadFixture) -> Iterator[OpenAI]:
    store = ResponseStore(fixture.data)
    fixture.app = create_app(fixture.engine, tenants=fixture.tenants, stored=store)
    running = BackgroundResponses(store).runs(fixture.app)
    with (
        serving(fixture.app, None, running) as address,
        openai_client(address, fixture.key("ann")) as client,
    ):
        yield client


def test_a_response_may_say_when_it_has_to_be_there(client: OpenAI) -> None:
    window = {"background_options": {"completion_window": "2h", "continuation_id": "job"}}
    begun = client.responses.create(model="base", input="hi", background=True, extra_body=window)
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed", "it is complete")
    window["background_options"]["completion_window"] = "9h"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="base", input="hi", background=True, extra_body=window)
    assert refused.value.param == "background_options.completion_window"


def test_a_response_is_begun_polled_and_complete(client: OpenAI, fixture: UploadFixture) -> None:
    begun = client.responses.create(model="base", input="hi", background=True)
    assert (begun.status, begun.background, begun.store, begun.output) == ("queued", True, True, [])
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed", "it is complete")
    done = client.responses.retrieve(begun.id)
    assert (done.id, done.output_text, done.background) == (begun.id, "Hello, world!", True)
    assert done.created_at == begun.created_at
    assert done.usage is not None
    assert done.usage.output_tokens == 14
    follow = client.responses.create(model="base", input="and?", previous_response_id=begun.id)
    assert follow.output_text == "Hello, world!"


def test_a_response_that_is_cancelled_stays_so(client: OpenAI, fixture: UploadFixture) -> None:
    fixture.engine.hold_after = 2
    begun = client.responses.create(model="base", input="hi", background=True)
    eventually(lambda: client.responses.retrieve(begun.id).status == "in_progress", "it is in progress")
    for _ in range(2):
        assert client.responses.cancel(begun.id).status == "cancelled"
    eventually(lambda: not fixture.engine.live, "the engine has released it")
    assert client.responses.retrieve(begun.id).status == "cancelled"


def test_one_that_is_deleted_ends_and_is_not_kept(client: OpenAI, fixture: UploadFixture) -> None:
    fixture.engine.hold_after = 2
    begun = client.responses.create(model="base", input="hi", background=True)
    client.responses.delete(begun.id)
    eventually(lambda: not fixture.engine.live, "the engine has released it")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_only_one_in_the_background_can_be_cancelled(client: OpenAI) -> None:
    done = client.responses.create(model="base", input="hi")
    with pytest.raises(openai.ConflictError):
        client.responses.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": False}, "store"),
        ({"stream": True}, "stream"),
        ({"model": "nobody"}, "model"),
        ({"input": "x" * 9000}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_refused_before_it_is_queued(
    fields: dict[str, Any], param: str, client: OpenAI, fixture: UploadFixture
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(**ASKED | fields)
    assert refused.value.status_code in (400, 404)
    assert refused.value.param == param  # type: ignore[attr-defined]
    assert fixture.engine.submitted == []


def test_an_engine_that_fails_makes_a_failed_response(client: OpenAI, fixture: UploadFixture) -> None:
    fixture.engine.fail_after = 3
    begun = client.responses.create(model="base", input="hi", background=True)
    eventually(lambda: client.responses.retrieve(begun.id).status == "failed", "it has failed")
    error = client.responses.retrieve(begun.id).error
    assert error is not None
    assert (error.code, "planted" in error.message) == ("server_error", True)


def test_one_whose_tenant_is_revoked_ends(client: OpenAI, fixture: UploadFixture) -> None:
    fixture.engine.hold_after = 2
    begun = client.responses.create(model="base", input="hi", background=True)
    eventually(lambda: bool(fixture.engine.live), "it runs")
    with httpx.Client(base_url=str(client.base_url)) as admin:
        headers = {"authorization": f"Bearer {fixture.key('boss', 'admin')}"}
        assert admin.delete("tenants/ann", headers=headers).status_code == 200
    eventually(lambda: not fixture.engine.live, "the engine has released it")
    store: ResponseStore = fixture.app.state.services.responses

    def kept() -> Any:
        return json.loads(store.find("ann", begun.id).response)

    eventually(lambda: kept()["status"] == "failed", "it has failed")
    error = kept()["error"]
    assert error == {"code": "server_error", "message": "The API key was revoked while the request ran."}


def test_a_tenant_has_a_bounded_number_of_them(
    client: OpenAI, fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_LIVE", 2)
    fixture.engine.hold_after = 0
    for _ in range(2):
        client.responses.create(model="base", input="hi", background=True)
    with pytest.raises(openai.RateLimitError) as refused:
        client.responses.create(model="base", input="hi", background=True)
    assert refused.value.code == "quota_exceeded"


def test_without_a_place_for_it_there_is_no_background() -> None:
    with serving(create_app(make_engine())) as address:
        refused = httpx.post(f"{address}{PATH}", json=ASKED)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
