"""Adapters that an admin keeps on the device."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from uploads import BOUNDS, UploadFixture, open_fixture, upload, whole

from personae.api.adapters.keep_loaded import KeptLoaded
from personae.lora.bounds import AdapterBounds

pytestmark = pytest.mark.anyio
ROOM = AdapterBounds(BOUNDS.shapes, 16, BOUNDS.max_value, max_extra=2**20, capacity_rows=32, max_adapters=4)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data", bounds=ROOM) as fixture:
        yield fixture


async def keep(client: httpx.AsyncClient, name: str, wanted: object = True, **params: str) -> httpx.Response:
    return await client.patch(f"/v1/adapters/{name}", json={"keep_loaded": wanted}, params=params)


def digests_of(fixture: UploadFixture) -> tuple[str, ...]:
    return fixture.registry.kept_loaded(fixture.registry.base)


async def test_what_the_name_means_is_kept_loaded_and_a_new_version_takes_its_place(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        first = (await upload(client, "poet", whole(1))).json()
        assert not first["keep_loaded"]
        assert digests_of(fixture) == ()
        answer = await keep(client, "poet")
        assert answer.status_code == 200, answer.text
        assert answer.json()["keep_loaded"]
        assert digests_of(fixture) == (first["sha256"],)
        second = (await upload(client, "poet", whole(2), replace="true")).json()
        assert second["keep_loaded"]
        assert digests_of(fixture) == (second["sha256"],)
        assert (await client.patch("/v1/adapters/poet", json={"pinned": 1})).status_code == 200
        assert digests_of(fixture) == (first["sha256"],)
        assert not (await keep(client, "poet", False)).json()["keep_loaded"]
        assert digests_of(fixture) == ()
        await keep(client, "poet")
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
        assert digests_of(fixture) == ()
        assert not (await upload(client, "poet", whole(1))).json()["keep_loaded"]


async def test_only_an_admin_keeps_an_adapter_loaded_and_for_any_tenant(fixture: UploadFixture) -> None:
    ann, admin = fixture.key("ann"), fixture.key("operator", "admin")
    async with fixture.client(ann) as client:
        digest = (await upload(client, "poet", whole())).json()["sha256"]
        refused = await keep(client, "poet")
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "keep_loaded"
        assert digests_of(fixture) == ()
    async with fixture.client(admin) as client:
        assert (await keep(client, "poet", tenant="ann")).status_code == 200
        assert digests_of(fixture) == (digest,)
        assert (await keep(client, "poet", tenant="bob")).status_code == 404
        assert (await keep(client, "none", tenant="ann")).json()["error"]["code"] == "adapter_not_found"


@pytest.mark.parametrize("wanted", [None, "true", 1])
async def test_keep_loaded_must_be_true_or_false(fixture: UploadFixture, wanted: object) -> None:
    async with fixture.client() as client:
        await upload(client, "poet", whole())
        refused = await keep(client, "poet", wanted)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "keep_loaded"


async def test_one_request_changes_one_thing(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await upload(client, "poet", whole())
        refused = await client.patch("/v1/adapters/poet", json={"keep_loaded": True, "pinned": 1})
        assert refused.status_code == 400
        assert "`pinned` and `keep_loaded`" in refused.json()["error"]["message"]
        assert digests_of(fixture) == ()


async def test_adapters_that_stay_leave_half_of_the_slots_and_ranks_to_others(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        for name, rank in (("one", 2), ("two", 2), ("three", 2), ("wide", 16)):
            assert (await upload(client, name, whole(rank=rank))).status_code == 201
        assert (await keep(client, "one")).status_code == 200
        refused = await keep(client, "wide")  # 8 and 16 ranks, in whole pages, of 32
        assert refused.status_code == 409
        assert "24 ranks of a module; at most half" in refused.json()["error"]["message"]
        assert (await keep(client, "two")).status_code == 200
        refused = await keep(client, "three")
        assert refused.status_code == 409
        assert "3 adapters; at most half" in refused.json()["error"]["message"]


async def test_a_version_that_leaves_too_little_is_neither_taken_nor_pinned(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await upload(client, "one", whole(1))
        await upload(client, "poet", whole(2, rank=16))
        digest = (await upload(client, "poet", whole(3), replace="true")).json()["sha256"]
        assert (await keep(client, "one")).status_code == 200
        assert (await keep(client, "poet")).status_code == 200
        pinned = await client.patch("/v1/adapters/poet", json={"pinned": 1})
        larger = await upload(client, "poet", whole(4, rank=16), replace="true")
        assert [pinned.status_code, larger.status_code] == [409, 409]
        record = (await client.get("/v1/adapters/poet")).json()
        assert (record["sha256"], record["versions"]) == (digest, [1, 2])


async def test_the_engine_is_told_at_the_start_and_after_each_change(fixture: UploadFixture) -> None:
    services = fixture.app.state.services
    told: list[tuple[str, ...]] = []
    fixture.engine.keep_loaded = told.append
    kept = KeptLoaded(services)
    async with fixture.client() as client:
        digest = (await upload(client, "poet", whole())).json()["sha256"]
        kept.check()
        assert told == []  # nothing is kept: nothing to tell
        await keep(client, "poet")
        kept.check()
        kept.check()
        assert told == [(digest,)]
        later: list[tuple[str, ...]] = []
        fixture.engine.keep_loaded = later.append
        KeptLoaded(services).check()
        assert later == [(digest,)]
        await keep(client, "poet", False)
        kept.check()
        assert later[-1] == ()


async def test_without_a_registry_nothing_is_kept() -> None:
    KeptLoaded(SimpleNamespace(registry=None)).check()  # type: ignore[arg-type]  # it asks for nothing else
