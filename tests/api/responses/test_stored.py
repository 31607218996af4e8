"""Responses that are stored, continued, shown and forgotten."""

import time
from typing import Any

import asgi
import openai
import pytest
from fake_engine import FakeEngine, FakeStream
from openai import OpenAI
from responses_asked import THOUGHT, WEATHER, prompt_of
from tool_chat import call
from uploads import UploadFixture

from personae.api.app import create_app
from personae.api.responses.store import KEPT_SECONDS, ResponseStore
from personae.errors import NotFound, Overloaded, StorageFailed

PATH = "/v1/responses"


def store_of(fixture: UploadFixture) -> ResponseStore:
    store: ResponseStore = fixture.app.state.services.responses
    return store


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_conversation_goes_on_from_a_stored_response(
    streamed: bool, ann: OpenAI, fixture: UploadFixture
) -> None:
    def create(**fields: Any) -> Any:
        if not streamed:
            return ann.responses.create(model="base", **fields)
        *_, last = ann.responses.create(model="base", stream=True, **fields)
        return last.response

    engine = fixture.engine
    engine.answer = f"{THOUGHT}Nice to meet you."
    first = create(input="I am Ada.", instructions="Be kind.")
    assert (first.store, first.previous_response_id) == (True, None)
    engine.answer = call("get_weather", city="Bonn")
    second = create(input="The weather?", previous_response_id=first.id, tools=[WEATHER])
    assert second.previous_response_id == first.id
    prompt = prompt_of(engine)
    assert "I am Ada.<|im_end|>" in prompt
    assert f"{THOUGHT}Nice to meet you." in prompt
    assert "Be kind." not in prompt
    engine.answer = "It rains."
    result = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "rain"}
    third = create(input=[result], previous_response_id=second.id, tools=[WEATHER])
    prompt = prompt_of(engine)
    assert prompt.index("I am Ada.") < prompt.index("Bonn") < prompt.index("<|im_start|>tool\nrain")
    shown = ann.responses.retrieve(third.id)
    assert shown.output_text == "It rains."
    assert shown.model_dump() == third.model_dump()


def test_what_is_not_to_be_stored_is_not(ann: OpenAI, fixture: UploadFixture) -> None:
    answer = ann.responses.create(model="base", input="hi", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(answer.id)


def test_a_forgotten_response_cannot_be_continued_nor_what_follows_it(
    ann: OpenAI, fixture: UploadFixture
) -> None:
    first = ann.responses.create(model="base", input="hi")
    second = ann.responses.create(model="base", input="ho", previous_response_id=first.id)
    ann.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(first.id)
    for id in (first.id, second.id, "resp_nothing"):
        with pytest.raises(openai.BadRequestError) as refused:
            ann.responses.create(model="base", input="ha", previous_response_id=id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"


@pytest.mark.anyio
async def test_another_tenants_response_is_the_same_as_none(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann")) as ann, fixture.client(fixture.key("bob")) as bob:
        id = (await ann.post(PATH, json={"model": "base", "input": "hi"})).json()["id"]
        assert (await bob.get(f"{PATH}/{id}")).status_code == 404
        assert (await bob.delete(f"{PATH}/{id}")).status_code == 404
        asked = {"model": "base", "input": "hi", "previous_response_id": id}
        assert (await bob.post(PATH, json=asked)).status_code == 400
        assert (await ann.get(f"{PATH}/{id}")).status_code == 200


@pytest.mark.anyio
async def test_errors_count_the_clients_own_items(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann")) as ann:
        id = (await ann.post(PATH, json={"model": "base", "input": "hi"})).json()["id"]
        wrong = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
        asked = {"model": "base", "input": wrong, "previous_response_id": id}
        refused = await ann.post(PATH, json=asked)
        assert refused.json()["error"]["param"] == "input[0].content[0].type"


@pytest.mark.anyio
async def test_a_tenants_oldest_responses_are_forgotten_beyond_its_quota(fixture: UploadFixture) -> None:
    fixture.engine.answer = "x" * 1000
    async with fixture.client(fixture.key("ann", response_bytes=20_000)) as ann:
        ids = []
        for _ in range(20):
            ids.append((await ann.post(PATH, json={"model": "base", "input": "hi"})).json()["id"])
            store_of(fixture).prune()
        found = [(await ann.get(f"{PATH}/{id}")).status_code for id in ids]
        assert found == sorted(found, reverse=True)
        assert {found[0], found[-1]} == {404, 200}
        (used,) = fixture.data.rows("select total(bytes) from responses")[0]
        assert used <= 20_000


@pytest.mark.anyio
async def test_responses_are_forgotten_after_thirty_days_also_if_that_fails_at_first(
    fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise StorageFailed("The disk is full.")

    now = time.time()
    store = ResponseStore(fixture.data, lambda: now)
    fixture.app = create_app(fixture.engine, stored=store)
    async with fixture.client() as client:
        id = (await client.post(PATH, json={"model": "base", "input": "hi"})).json()["id"]
        store.prune()
        assert ResponseStore(fixture.data).find("default", id).id == id
        now += KEPT_SECONDS + 1
        with monkeypatch.context() as broken:
            broken.setattr(fixture.data, "write", full)
            with pytest.raises(StorageFailed):
                store.prune()
        assert store.find("default", id).id == id
        store.prune()
        with pytest.raises(NotFound):
            store.find("default", id)


@pytest.mark.anyio
async def test_a_server_without_a_store_says_so() -> None:
    app = create_app(FakeEngine())
    visit = await asgi.Visit(PATH, {"model": "base", "input": "hi", "store": True}).run(app)
    assert visit.headers["x-personae-ignored"] == "store"
    body = {"model": "base", "input": "hi", "previous_response_id": "resp_1"}
    assert (await asgi.Visit(PATH, body).run(app)).error["param"] == "previous_response_id"


def test_references_to_stored_items_stand_for_the_items(ann: OpenAI, fixture: UploadFixture) -> None:
    engine = fixture.engine
    engine.answer = f"{THOUGHT}I look.{call('get_weather', city='Bonn')}"
    first = ann.responses.create(model="base", input="The weather?", tools=[WEATHER])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    asked = ann.responses.input_items.list(first.id).data
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    ids = [str(item.id) for item in [*asked, *first.output]]
    references = [{"type": "item_reference", "id": id} for id in ids]
    engine.answer = "It rains."
    second = ann.responses.create(model="base", input=[*references, result], tools=[WEATHER])
    by_reference = prompt_of(engine)
    ann.responses.create(
        model="base", input=[result], previous_response_id=first.id, tools=[WEATHER], store=False
    )
    assert by_reference == prompt_of(engine)
    assert "The weather?" in by_reference
    third = [
        {"type": "item_reference", "id": second.output[0].id},
        {"type": "message", "role": "user", "content": "Thanks!"},
    ]
    ann.responses.create(model="base", input=third, previous_response_id=first.id, store=False)
    assert "It rains." in prompt_of(engine)
    kept = ann.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in kept] == [
        *("message", "reasoning", "message", "function_call"),
        "function_call_output",
    ]


def test_references_to_items_that_are_not_the_tenants_are_refused(
    ann: OpenAI, fixture: UploadFixture
) -> None:
    mine = ann.responses.create(model="base", input="Hi.")
    gone = ann.responses.create(model="base", input="Hi.", store=False)
    item = mine.output[0].id
    other = ann.with_options(api_key=fixture.key("bob"))
    with other:
        for asker, ids, why in (
            (other, [item], "no stored item"),
            (ann, ["msg_1"], "no stored item"),
            (ann, [gone.output[0].id], "no stored item"),
            (ann, [f"{item[:-4]}0001"], "no stored item"),
            (ann, [item, item], "the same item"),
        ):
            references = [{"type": "item_reference", "id": id} for id in ids]
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                asker.responses.create(model="base", input=references)
            assert refused.value.param == f"input[{len(ids) - 1}]"


@pytest.mark.parametrize("store", [True, False])
def test_a_stream_that_a_stop_ends_says_where_what_is_complete_can_be_fetched(
    store: bool, ann: OpenAI, fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.engine.answer = f"{THOUGHT}{'A long answer. ' * 20}"
    go_on, stopping = FakeStream.__anext__, Overloaded("Send it again.", code="shutting_down")
    steps = iter(range(len(THOUGHT) + 4))

    async def stop_soon(stream: FakeStream) -> Any:
        if next(steps, None) is None:
            raise stopping
        return await go_on(stream)

    monkeypatch.setattr(FakeStream, "__anext__", stop_soon)
    *_, last = ann.responses.create(model="base", input="hi", stream=True, store=store)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    found = f" What is complete of this one is at /v1/responses/{last.response.id}."
    assert last.response.error.message == "Send it again." + (found if store else "")
    assert stopping.message == "Send it again.", "other streams get the same error"
    if not store:
        with pytest.raises(openai.NotFoundError):
            ann.responses.retrieve(last.response.id)
        return
    kept = ann.responses.retrieve(last.response.id)
    assert (kept.status, [item.type for item in kept.output]) == ("failed", ["reasoning"])
