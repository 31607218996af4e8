"""Conversations by the `openai` package, unchanged, against the real server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from responses_asked import THOUGHT, WEATHER, prompt_of
from tool_chat import call
from uploads import UploadFixture

from personae.api.responses.conversations import ConversationStore
from personae.api.tenants.store import TenantLimits
from personae.errors import NotFound


@pytest.fixture
def address(fixture: UploadFixture) -> Iterator[str]:
    with serving(fixture.app) as address:
        yield address


@pytest.fixture
def client(address: str, fixture: UploadFixture) -> Iterator[OpenAI]:
    with openai_client(address, fixture.key("ann")) as client:
        yield client


def message(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(client: OpenAI, id: str, **fields: Any) -> list[str]:
    """The texts of a conversation's messages, over all pages."""
    items = client.conversations.items.list(id, **fields)
    return [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]


def test_a_conversation_is_made_changed_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "names"}, items=[message("I am Ada.")])
    assert (made.object, made.metadata) == ("conversation", {"topic": "names"})
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "other"})
    assert client.conversations.retrieve(made.id).metadata == changed.metadata == {"topic": "other"}
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for asked in (
        client.conversations.retrieve,
        client.conversations.items.list,
        client.conversations.delete,
    ):
        with pytest.raises(openai.NotFoundError):
            asked(made.id)


def test_items_are_added_listed_shown_and_deleted(client: OpenAI) -> None:
    id = client.conversations.create(items=[message("a")]).id
    added = client.conversations.items.create(
        id, items=[message("b", "assistant"), {"role": "user", "content": "c"}]
    )
    assert [item.type for item in added.data] == ["message", "message"]
    result = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    called = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    client.conversations.items.create(id, items=[called, result])  # type: ignore[list-item]
    assert texts(client, id) == ["c", "b", "a"], "the newest first"
    assert texts(client, id, order="asc", limit=2) == ["a", "b", "c"], "the client walks over all pages"
    page = client.conversations.items.list(id, limit=2)
    assert ([item.type for item in page.data], page.has_more) == (
        ["function_call_output", "function_call"],
        True,
    )
    assert added.data[0].id
    shown = client.conversations.items.retrieve(added.data[0].id, conversation_id=id)
    assert shown == added.data[0]
    assert client.conversations.items.delete(added.data[0].id, conversation_id=id).id == id
    assert texts(client, id) == ["c", "a"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.data[0].id, conversation_id=id)


def test_responses_read_a_conversation_and_add_to_it(client: OpenAI, fixture: UploadFixture) -> None:
    id = client.conversations.create(items=[message("I am Ada.")]).id
    fixture.engine.answer = f"{THOUGHT}Nice to meet you."
    first = client.responses.create(model="base", input="Hello!", conversation=id)
    assert first.conversation is not None
    assert first.conversation.id == id
    fixture.engine.answer = call("get_weather", city="Bonn")
    second = client.responses.create(
        model="base", input="The weather?", conversation={"id": id}, tools=[WEATHER], store=False
    )
    prompt = prompt_of(fixture.engine)
    places = [prompt.index(text) for text in ("I am Ada.", "Hello!", "Nice to meet you.", "The weather?")]
    assert places == sorted(places)
    fixture.engine.answer = "It rains."
    result = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "rain"}  # type: ignore[union-attr]
    *_, last = client.responses.create(
        model="base", input=[result], conversation=id, tools=[WEATHER], stream=True
    )
    assert "<|im_start|>tool\nrain" in prompt_of(fixture.engine)
    assert last.response.conversation.id == id
    items = list(client.conversations.items.list(id, order="asc"))
    assert [item.type for item in items] == [
        "message",
        "message",
        "reasoning",
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert texts(client, id)[0] == "It rains."


def test_a_conversation_and_a_previous_response_exclude_each_other(client: OpenAI) -> None:
    id = client.conversations.create().id
    before = client.responses.create(model="base", input="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="base", input="a", conversation=id, previous_response_id=before.id)
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="base", input="a", conversation="conv_none")
    assert missing.value.param == "conversation"


def test_input_items_are_those_of_the_request_itself(client: OpenAI) -> None:
    first = client.responses.create(model="base", input="I am Ada.")
    second = client.responses.create(
        model="base",
        input=[message("a", "developer"), message("b"), message("c")],
        previous_response_id=first.id,
    )
    [only] = client.responses.input_items.list(first.id).data
    assert (only.type, only.role, only.content[0].text) == ("message", "user", "I am Ada.")  # type: ignore[union-attr]
    found = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.content[0].text for item in found] == ["a", "b", "c"]  # type: ignore[union-attr]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [
        item.id for item in reversed(found)
    ]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(second.id, after="msg_none")


def test_another_tenants_conversation_is_the_same_as_none(
    client: OpenAI, address: str, fixture: UploadFixture
) -> None:
    id = client.conversations.create(items=[message("a")]).id
    with openai_client(address, fixture.key("bob")) as bob:
        for asked in (bob.conversations.retrieve, bob.conversations.delete, bob.conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                asked(id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="base", input="a", conversation=id)
    assert texts(client, id) == ["a"]


def test_a_tenants_conversations_are_bounded(client: OpenAI, fixture: UploadFixture) -> None:
    fixture.tenants.change_limits("ann", TenantLimits(response_bytes=4000))
    id = client.conversations.create(items=[message("x" * 1000)]).id
    with pytest.raises(openai.RateLimitError) as refused:
        client.conversations.items.create(id, items=[message("x" * 2500)])
    assert refused.value.code == "quota_exceeded"
    client.conversations.items.create(id, items=[message("x" * 1500)])
    refusals = 0
    for _ in range(5):
        try:
            client.conversations.create()
        except openai.RateLimitError:
            refusals += 1
    assert refusals >= 2, "empty ones count, too"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="base", input="a", conversation=id)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([message("a")] * 21, "items"),
        ([{"type": "item_reference", "id": "msg_1"}], "items[0]"),
        ([{"type": "message", "role": "nobody", "content": "a"}], "items[0].role"),
    ],
)
def test_wrong_items_are_refused_by_name(items: Any, param: str, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.conversations.create(items=items)
    assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        client.conversations.create(metadata={str(i): "x" for i in range(17)})
    assert refused.value.param == "metadata"


def test_a_freed_tenants_conversations_are_gone(client: OpenAI, fixture: UploadFixture) -> None:
    id = client.conversations.create(items=[message("a")]).id
    fixture.tenants.revoke_tenant("ann")
    fixture.tenants.free_tenant("ann")
    with pytest.raises(NotFound):
        ConversationStore(fixture.data).find("ann", id)
    assert fixture.data.rows("select 1 from conversation_items") == []
