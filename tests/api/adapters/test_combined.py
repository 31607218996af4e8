"""`adapters` of a request: what is refused by which field, and what reaches the engine."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uploads import UploadFixture, open_fixture, upload, whole
from virtual_clock import real_clock

from personae.api.settings import ApiSettings
from personae.lora.mix_id import mix_id, parts_of

pytestmark = real_clock


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path, settings=ApiSettings(max_rank=12)) as fixture:
        yield fixture


@pytest.fixture
async def client(fixture: UploadFixture) -> AsyncIterator[httpx.AsyncClient]:
    async with fixture.client() as client:
        for seed, name in enumerate(("one", "two")):
            assert (await upload(client, name, whole(seed))).status_code == 201
        yield client


async def ask(client: httpx.AsyncClient, adapters: Any, model: str = "base") -> httpx.Response:
    body = {"model": model, "prompt": "hi", "max_tokens": 4, "adapters": adapters}
    return await client.post("/v1/completions", json=body)


async def test_the_engine_is_asked_for_the_weighted_mix_and_the_answer_is_the_bases(
    fixture: UploadFixture, client: httpx.AsyncClient
) -> None:
    digests = {row["name"]: row["sha256"] for row in (await client.get("/v1/adapters")).json()["data"]}
    answer = await ask(client, [{"name": "one", "weight": 0.5}, {"name": "two"}])
    assert answer.json()["model"] == "base"
    (log,) = fixture.engine.submitted
    assert log.adapter == mix_id([(digests["two"], 1.0), (digests["one"], 0.5)])
    await client.post(
        "/v1/chat/completions",
        json={
            "model": "base",
            "messages": [{"role": "user", "content": "hi"}],
            "adapters": [{"name": "one", "weight": -2}],
        },
    )
    assert parts_of(fixture.engine.submitted[-1].adapter) == [(digests["one"], -2.0)]
    assert (await ask(client, [])).status_code == 200
    assert fixture.engine.submitted[-1].adapter is None


@pytest.mark.parametrize(
    ("adapters", "status", "param"),
    [
        ([{"name": "none"}], 404, "adapters[0].name"),
        ([{"name": "one"}, {"name": "base"}], 400, "adapters[1].name"),
        ([{"name": "one", "weight": 0}], 400, "adapters[0].weight"),
        ([{"name": "one", "weight": 17}], 400, "adapters[0].weight"),
        ([{"name": "one"}, {"name": "one", "weight": 2}], 400, "adapters"),
        ([{"name": "one"}, {"name": "two"}, {"name": "team/pirate"}], 200, None),
        ([{"name": "one"}] * 9, 400, "adapters"),
        ([{"name": "one", "wait": 1}], 400, "adapters[0].wait"),
        ("one", 400, "adapters"),
    ],
    ids=str,
)
async def test_what_cannot_be_combined_is_refused_by_its_field(
    client: httpx.AsyncClient, adapters: Any, status: int, param: str | None
) -> None:
    response = await ask(client, adapters)
    assert response.status_code == status, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_more_ranks_than_the_memory_holds_and_an_adapter_as_the_model_are_refused(
    fixture: UploadFixture, client: httpx.AsyncClient
) -> None:
    await upload(client, "big", whole(3, rank=12))
    response = await ask(client, [{"name": "one"}, {"name": "big"}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "adapters")
    assert "14 ranks together" in response.json()["error"]["message"]
    response = await ask(client, [{"name": "one"}], model="two")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert fixture.engine.submitted == []
