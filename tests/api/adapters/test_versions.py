"""Versions of uploaded adapters, and aliases that split requests among them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.adapters.aliases import AliasRecord
from personae.api.adapters.registry import KEPT_VERSIONS

pytestmark = pytest.mark.anyio
PATCH = "/v1/adapters/poet"


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data") as fixture:
        yield fixture


async def push(client: httpx.AsyncClient, count: int, name: str = "poet", first: int = 1) -> list[str]:
    """The digests of so many versions."""
    answers = [
        await upload(client, name, whole(seed), replace="true") for seed in range(first, first + count)
    ]
    assert [answer.status_code for answer in answers] == [201] * count
    return [answer.json()["sha256"] for answer in answers]


async def ask(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_an_earlier_version_can_be_asked_for_and_the_name_means_the_newest(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        first, second = await push(client, 2)
        for model, digest, ran in (
            ("poet", second, "poet@2"),
            ("poet@1", first, "poet@1"),
            ("poet@2", second, "poet@2"),
        ):
            answer = await ask(client, model)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            assert answer.headers["x-personae-adapter"] == ran
            assert fixture.engine.submitted[-1].adapter == digest
        record = (await client.get("/v1/adapters/poet@1")).json()
        assert (record["version"], record["sha256"], record["versions"]) == (1, first, [1, 2])
        listed = (await client.get("/v1/adapters/poet/versions")).json()["data"]
        assert [(one["version"], one["sha256"]) for one in listed] == [(2, second), (1, first)]


@pytest.mark.parametrize("name", ["poet@3", "poet@0", "poet@01", "poet@", "poet@x", f"poet@{'9' * 400}"])
async def test_a_version_that_does_not_exist_is_a_404(fixture: UploadFixture, name: str) -> None:
    async with fixture.client() as client:
        await push(client, 2)
        assert (await ask(client, name)).status_code == 404
        assert (await client.get(f"/v1/adapters/{name}")).status_code == 404
        assert (await client.delete(f"/v1/adapters/{name}")).status_code == 404
        assert (await client.get("/v1/adapters/poet")).json()["versions"] == [1, 2]


async def test_a_pinned_name_keeps_its_version_until_it_is_unpinned_and_over_a_restart(
    tmp_path: Path,
) -> None:
    with open_fixture(tmp_path / "data") as fixture:
        async with fixture.client() as client:
            first, second = await push(client, 2)
            pinned = (await client.patch(PATCH, json={"pinned": 1})).json()
            assert (pinned["version"], pinned["sha256"], pinned["pinned"]) == (1, first, True)
            third = (await upload(client, "poet", whole(3), replace="true")).json()
            assert third["version"] == 3
    with open_fixture(tmp_path / "data") as fixture:
        async with fixture.client() as client:
            served = (await client.get("/v1/adapters/poet")).json()
            assert (served["version"], served["pinned"], served["versions"]) == (1, True, [1, 2, 3])
            assert (await ask(client, "poet@2")).status_code == 200
            assert fixture.engine.submitted[-1].adapter == second
            back = (await client.patch(PATCH, json={"pinned": None})).json()
            assert (back["version"], back["pinned"], back["sha256"]) == (3, False, third["sha256"])
        assert fixture.leftovers() == []


@pytest.mark.parametrize(
    ("body", "status"), [({"pinned": 9}, 404), ({"pinned": 0}, 400), ({"pinned": "a"}, 400), ({"x": 1}, 400)]
)
async def test_bad_pins_are_refused_and_change_nothing(
    fixture: UploadFixture, body: dict[str, Any], status: int
) -> None:
    async with fixture.client() as client:
        await push(client, 2)
        refused = await client.patch(PATCH, json=body)
        assert refused.status_code == status
        assert (await client.get("/v1/adapters/poet")).json()["version"] == 2
        assert (await client.patch("/v1/adapters/none", json={"pinned": 1})).status_code == 404


async def test_so_many_versions_are_kept_and_numbers_are_never_used_twice(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        count = KEPT_VERSIONS + 3
        await push(client, count)
        record = (await client.get("/v1/adapters/poet")).json()
        assert record["versions"] == list(range(count - KEPT_VERSIONS, count + 1))
        await client.patch(PATCH, json={"pinned": count - 1})
        assert (await client.delete(f"/v1/adapters/poet@{count}")).status_code == 200
        await push(client, 1, first=99)
        versions = (await client.get("/v1/adapters/poet")).json()["versions"]
        assert (count in versions, count + 1 in versions) == (False, True)
        assert fixture.leftovers() == []


async def test_the_version_that_serves_a_name_stays_while_there_are_others(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await push(client, 2)
        refused = await client.delete("/v1/adapters/poet@2")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert (await client.delete("/v1/adapters/poet@1")).status_code == 200
        assert (await client.delete("/v1/adapters/poet@2")).status_code == 200
        assert (await client.get("/v1/adapters/poet")).status_code == 404
        assert fixture.leftovers() == []
        assert (await upload(client, "poet", whole(7))).json()["version"] == 1


async def test_earlier_versions_make_room_when_the_tenant_has_none(fixture: UploadFixture) -> None:
    size = sum(map(len, whole().values()))
    async with fixture.client(fixture.key("ann", bytes=2 * size + size // 2)) as client:
        await push(client, 3)
        assert (await client.get("/v1/adapters/poet")).json()["versions"] == [2, 3]
        assert (await upload(client, "other", whole(9))).status_code == 201
        assert (await client.get("/v1/adapters/poet")).json()["versions"] == [3]
        refused = await upload(client, "third", whole(10))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert fixture.leftovers() == []


async def test_other_tenants_see_only_the_versions_that_were_shared(fixture: UploadFixture) -> None:
    root = fixture.key("root", "admin")
    async with fixture.client(root) as full, fixture.client(fixture.key("ann")) as ann:
        await upload(full, "poet", whole(1))
        await upload(full, "poet", whole(2), replace="true", shared="true")
        assert (await ann.get("/v1/adapters/poet")).json()["versions"] == [2]
        assert (await ask(ann, "poet@1")).status_code == 404
        assert (await ask(ann, "poet@2")).status_code == 200
        assert [one["version"] for one in (await ann.get("/v1/adapters/poet/versions")).json()["data"]] == [2]
        assert (await ann.patch(PATCH, json={"pinned": 2})).status_code == 404, "it is not hers"


async def test_usage_and_metrics_name_the_version_that_ran(fixture: UploadFixture) -> None:
    key = fixture.key("root", "admin")
    async with fixture.client(key) as client:
        await push(client, 2)
        for model in ("poet", "poet@1", "poet@1", "base"):
            assert (await ask(client, model)).status_code == 200
        fixture.app.state.services.usage.flush()
        by_version = (await client.get("/v1/usage?group_by=version")).json()["data"]
        assert {row.get("version"): row["requests"] for row in by_version} == {
            "": 1,
            "poet@1": 2,
            "poet@2": 1,
        }
        by_name = (await client.get("/v1/usage?group_by=adapter")).json()["data"]
        assert {row["adapter"]: row["requests"] for row in by_name} == {"": 1, "poet": 3}
        text = (await client.get("/metrics")).text
        assert 'personae:adapter_version_requests_total{alias="",version="poet@1"} 2.0' in text


async def put(
    client: httpx.AsyncClient, targets: Any, name: str = "support", **fields: Any
) -> httpx.Response:
    return await client.put(f"/v1/adapter_aliases/{name}", json={"targets": targets, **fields})


async def test_an_alias_splits_requests_by_weight_and_keeps_a_session_with_its_choice(
    fixture: UploadFixture,
) -> None:
    async with fixture.client(fixture.key("root", "admin")) as client:
        await push(client, 2, "support")
        made = await put(client, {"support@1": 95, "support@2": 5})
        assert made.status_code == 200, made.text
        assert made.json()["targets"] == {"support@1": 95, "support@2": 5}
        for fields in (
            {"headers": {"x-session-id": "one"}},
            {"user": "someone"},
            {"safety_identifier": "someone else"},
            {"prompt_cache_key": "k"},
        ):
            answers = [await ask(client, "support", **dict(fields)) for _ in range(4)]
            assert len({answer.json()["model"] for answer in answers}) == 1
        models = [(await ask(client, "support", user=str(number))).json()["model"] for number in range(60)]
        assert set(models) <= {"support@1", "support@2"}
        await put(client, {"support@1": 0, "support@2": 1})
        answer = await ask(client, "support")
        assert (answer.json()["model"], answer.headers["x-personae-adapter"]) == ("support@2", "support@2")
        text = (await client.get("/metrics")).text
        assert 'personae:adapter_version_requests_total{alias="support",version="support@2"}' in text
        assert (await client.get("/v1/models/support")).json()["id"] == "support"
        assert (await client.get("/v1/adapter_aliases/support")).json()["targets"]["support@1"] == 0
        assert (await client.delete("/v1/adapter_aliases/support")).json()["deleted"] is True
        assert (await ask(client, "support")).json()["model"] == "support", "the adapter of that name again"


def test_shares_are_those_of_the_weights_and_a_change_moves_only_what_it_must() -> None:
    before = AliasRecord("support", {"a": 95.0, "b": 5.0}, 0, shared=False)
    after = AliasRecord("support", {"a": 80.0, "b": 20.0}, 0, shared=False)
    keys = [f"user {number}" for number in range(20_000)]
    first = {key: before.choose(key) for key in keys}
    assert Counter(first.values())["b"] / len(keys) == pytest.approx(0.05, abs=0.01)
    moved = [key for key in keys if after.choose(key) != first[key]]
    assert len(moved) / len(keys) == pytest.approx(0.15, abs=0.01)
    assert {first[key] for key in moved} == {"a"}
    drawn = Counter(before.choose(None) for _ in range(20_000))
    assert drawn["b"] / 20_000 == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("targets", "status"),
    [
        ({}, 400),
        ({"poet@1": -1}, 400),
        ({"poet@1": 0}, 400),
        ({"poet@1": 1e300}, 400),
        ({"poet@9": 1}, 404),
        ({"nobody": 1}, 404),
        ([1], 400),
        ({f"m{number}": 1 for number in range(17)}, 400),
    ],
)
async def test_bad_targets_are_refused_in_one_sentence(
    fixture: UploadFixture, targets: Any, status: int
) -> None:
    async with fixture.client() as client:
        await push(client, 1)
        refused = await put(client, targets)
        assert refused.status_code == status
        assert refused.json()["error"]["param"].startswith("targets")
        assert (await client.get("/v1/adapter_aliases")).json()["data"] == []
        assert (await put(client, {"poet": 1}, "base")).status_code == 409


async def test_what_an_alias_names_is_kept_until_the_alias_changes(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await push(client, 1)
        await put(client, {"poet@1": 1})
        await push(client, KEPT_VERSIONS + 2, first=10)
        assert 1 in (await client.get("/v1/adapters/poet")).json()["versions"]
        for name in ("poet@1", "poet"):
            refused = await client.delete(f"/v1/adapters/{name}")
            assert (refused.status_code, "alias" in refused.json()["error"]["message"]) == (409, True)
        assert (await ask(client, "support")).json()["model"] == "poet@1"
        await client.delete("/v1/adapter_aliases/support")
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
    assert fixture.leftovers() == []


async def test_tenants_have_aliases_of_their_own_and_only_admins_share(fixture: UploadFixture) -> None:
    root = fixture.key("root", "admin")
    async with (
        fixture.client(root) as full,
        fixture.client(fixture.key("ann")) as ann,
        fixture.client(fixture.key("bob")) as bob,
    ):
        await push(ann, 1)
        assert (await put(ann, {"poet": 1})).status_code == 200
        assert (await put(ann, {"poet": 1}, shared=True)).status_code == 403
        assert (await bob.get("/v1/adapter_aliases/support")).status_code == 404
        assert (await ask(bob, "support")).status_code == 404
        assert (await put(full, {"base": 1}, "plain", shared=True)).status_code == 200
        assert (await ask(bob, "plain")).json()["model"] == "base"
        assert (await bob.delete("/v1/adapter_aliases/plain")).status_code == 404
        named = await full.get("/v1/adapter_aliases?tenant=ann")
        assert [alias["name"] for alias in named.json()["data"]] == ["plain", "support"]


async def test_a_running_request_keeps_its_version(tmp_path: Path) -> None:
    engine = FakeEngine()
    with open_fixture(tmp_path / "data", engine) as fixture:
        async with fixture.client() as client:
            (first,) = await push(client, 1)
            with fixture.registry.files.hold(first):
                await push(client, 1, first=2)
                await client.delete("/v1/adapters/poet@1")
                assert (fixture.data.adapters / first).is_dir()
            fixture.registry.files._staging.settle()
            assert not (fixture.data.adapters / first).exists()
