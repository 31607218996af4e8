"""`/v1/tenants`, `/v1/keys` and `/v1/usage`: administration over HTTP while the server runs."""

import csv
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.app import create_app
from personae.api.tenants.store import TenantLimits
from personae.api.tenants.usage import NUMBERS, UsageLedger
from personae.errors import StorageFailed

pytestmark = pytest.mark.anyio
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path) as fixture:
        ledger = UsageLedger(fixture.data)
        fixture.app = create_app(
            fixture.engine, tenants=fixture.tenants, registry=fixture.registry, usage=ledger
        )
        yield fixture


async def test_from_a_tenant_to_a_key_to_an_answer_to_its_usage(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("root", "admin")) as admin:
        made = await admin.post("/v1/tenants", json={"name": "ann", "limits": {"requests_per_minute": 5}})
        assert (made.status_code, made.json()["limits"]) == (201, {"requests_per_minute": 5})
        expires = int(time.time()) + 3600
        key = await admin.post("/v1/keys", json={"tenant": "ann", "label": "laptop", "expires": expires})
        assert key.status_code == 201
        secret, id = key.json()["secret"], key.json()["id"]
        async with fixture.client(secret) as ann:
            assert (await ann.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert (
                await ann.post("/v1/chat/completions", json=CHAT | {"model": "team/pirate"})
            ).status_code == 200
        [shown] = [one for one in (await admin.get("/v1/keys?tenant=ann")).json()["data"] if one["id"] == id]
        assert (shown["label"], shown["expires"]) == ("laptop", expires)
        assert abs(shown["used"] - time.time()) < 120
        assert secret not in (await admin.get("/v1/keys")).text
        usage = (await admin.get("/v1/usage?tenant=ann")).json()["data"]
        assert [(row["key"], row["adapter"], row["requests"]) for row in usage] == [
            (id, "", 1),
            (id, "team/pirate", 1),
        ]
        for part, requests in (("adapter=", 1), ("adapter=team/pirate", 1), (f"key={id}", 2), ("key=", 0)):
            rows = (await admin.get(f"/v1/usage?tenant=ann&group_by=hour&{part}")).json()["data"]
            assert sum(row["requests"] for row in rows) == requests, part
        [total] = (await admin.get("/v1/usage?tenant=ann&group_by=tenant")).json()["data"]
        assert total.keys() == {"tenant", *NUMBERS}
        assert total["completion_tokens"] == 8
        assert total["last_hour"] % 3600 == 0
        assert 0 <= time.time() - total["last_hour"] < 2 * 3600
        assert 0 < total["cached_tokens"] < total["prompt_tokens"]
        table = await admin.get("/v1/usage?format=csv&group_by=adapter,tenant")
        assert table.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(table.text)))
        assert [row["adapter"] for row in rows] == ["", "team/pirate"]
        assert (await admin.get("/v1/usage?from=0&to=3600")).json()["data"] == []


async def test_usage_adds_up_over_restarts_and_survives_a_full_disk(
    fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise StorageFailed("The disk is full.")

    ledger = fixture.app.state.services.usage
    async with fixture.client(fixture.key("ann")) as ann:
        await ann.post("/v1/chat/completions", json=CHAT)
        ledger.flush()
        await ann.post("/v1/chat/completions", json=CHAT)
        with monkeypatch.context() as broken:
            broken.setattr(fixture.data, "write", full)
            with pytest.raises(StorageFailed):
                ledger.flush()
        [mine] = (await ann.get("/v1/usage?group_by=")).json()["data"]
        assert mine["requests"] == 2
        again = UsageLedger(fixture.data)
        assert again.rows(["tenant"])[0][0].requests == 2
        assert (await ann.get("/v1/usage?tenant=carl")).status_code == 403


async def test_limits_change_while_the_server_runs(fixture: UploadFixture) -> None:
    admin_key, key = fixture.key("root", "admin"), fixture.key("ann", concurrent=0)
    async with fixture.client(admin_key) as admin, fixture.client(key) as ann:
        assert (await ann.post("/v1/chat/completions", json=CHAT)).status_code == 429
        changed = await admin.patch("/v1/tenants/ann", json={"limits": {"concurrent": 3, "adapters": 1}})
        assert changed.json()["limits"] == {"concurrent": 3, "adapters": 1}
        assert (await ann.post("/v1/chat/completions", json=CHAT)).status_code == 200
        changed = await admin.patch("/v1/tenants/ann", json={"limits": {"concurrent": None}})
        assert changed.json()["limits"] == {"adapters": 1}
        assert (await admin.get("/v1/tenants/ann")).json() == changed.json()


async def test_a_key_expires_is_rotated_and_revoked(
    fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin_key, old = fixture.key("root", "admin"), fixture.key("ann")
    id = fixture.tenants.find_key(old).id
    async with fixture.client(admin_key) as admin:

        async def works(key: str) -> bool:
            async with fixture.client(key) as client:
                return (await client.get("/v1/models")).status_code == 200

        await admin.patch(f"/v1/keys/{id}", json={"label": "old"})
        new = (await admin.post(f"/v1/keys/{id}/rotate", json={"overlap": 60})).json()
        assert (new["tenant"], new["label"], new["expires"]) == ("ann", "old", None)
        assert await works(old)
        assert await works(new["secret"])
        later = time.time() + 61
        monkeypatch.setattr(time, "time", lambda: later)
        assert not await works(old)
        assert await works(new["secret"])
        assert (await admin.post(f"/v1/keys/{id}/rotate", json={})).status_code == 404
        newest = (await admin.post(f"/v1/keys/{new['id']}/rotate", json={})).json()
        assert not await works(new["secret"])
        assert (await admin.delete(f"/v1/keys/{newest['id']}")).json()["revoked"] is not None
        assert not await works(newest["secret"])


async def test_a_revoked_name_is_freed_with_all_that_was_its_own(fixture: UploadFixture) -> None:
    admin_key, key = fixture.key("root", "admin"), fixture.key("ann")
    async with fixture.client(admin_key) as admin:
        async with fixture.client(key) as ann:
            assert (await upload(ann, "poet", whole())).status_code == 201
            await ann.post("/v1/chat/completions", json=CHAT)
        before = fixture.engine.submitted[-1].salt
        assert (await admin.delete("/v1/tenants/ann")).json()["freed"] is False
        assert (await admin.post("/v1/tenants", json={"name": "ann"})).status_code == 409
        async with fixture.client(key) as ann:
            assert (await ann.get("/v1/models")).status_code == 401
        assert (await admin.delete("/v1/tenants/ann?free=true")).json()["freed"] is True
        assert (await admin.get("/v1/tenants/ann")).status_code == 404
        assert fixture.registry.count() == 0
        # Another tenant gets the name: nothing of the first is left to it.
        with fixture.data.write() as db:
            db.execute("insert into tenants values ('ann', 12345, null, '{}')")
        async with fixture.client(fixture.tenants.create_key("ann", "tenant")) as ann:
            assert (await ann.get("/v1/adapters")).json()["data"] == []
            assert (await ann.get("/v1/usage")).json()["data"] == []
            await ann.post("/v1/chat/completions", json=CHAT)
        assert fixture.engine.submitted[-1].salt != before
        names = {row["tenant"] for row in (await admin.get("/v1/usage?group_by=tenant")).json()["data"]}
        assert any(name.startswith("ann~") for name in names)


async def test_admins_see_and_delete_any_tenants_adapters(fixture: UploadFixture) -> None:
    admin_key, keys = fixture.key("root", "admin"), [fixture.key("ann"), fixture.key("carl")]
    for key in keys:
        async with fixture.client(key) as client:
            assert (await upload(client, "poet", whole())).status_code == 201
            assert (await client.get("/v1/adapters?tenant=*")).status_code == 403
            assert (await client.delete("/v1/adapters/poet?tenant=root")).status_code == 403
    async with fixture.client(admin_key) as admin:
        found = (await admin.get("/v1/adapters?tenant=*")).json()["data"]
        assert [(one["tenant"], one["name"]) for one in found] == [("ann", "poet"), ("carl", "poet")]
        assert (await admin.get("/v1/adapters")).json()["data"] == []
        assert (await admin.delete("/v1/adapters/poet?tenant=ann")).status_code == 200
        assert [one["tenant"] for one in (await admin.get("/v1/adapters?tenant=*")).json()["data"]] == [
            "carl"
        ]


async def test_the_first_key_has_to_be_an_admins(fixture: UploadFixture) -> None:
    fixture.tenants.create_tenant("ann", TenantLimits())
    async with fixture.client() as anybody:
        refused = await anybody.post("/v1/keys", json={"tenant": "ann"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "role")
        made = await anybody.post("/v1/keys", json={"tenant": "ann", "role": "admin"})
        assert made.status_code == 201
        assert (await anybody.get("/v1/tenants")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/tenants", {"name": "No Good"}, 400, "name"),
        ("POST", "/v1/tenants", {"name": "x", "limits": {"requests": 1}}, 400, "limits.requests"),
        ("POST", "/v1/tenants", {"name": "x", "limits": {"adapters": -1}}, 400, "limits.adapters"),
        ("POST", "/v1/tenants", {"name": "root"}, 409, "name"),
        ("PATCH", "/v1/tenants/root", {"limits": {"weight": 1000}}, 400, "limits.weight"),
        ("PATCH", "/v1/tenants/nobody", {"limits": {}}, 404, "name"),
        ("DELETE", "/v1/tenants/root?free=perhaps", None, 400, "free"),
        ("POST", "/v1/keys", {"tenant": "nobody"}, 404, "tenant"),
        ("POST", "/v1/keys", {"tenant": "root", "role": "king"}, 400, "role"),
        ("POST", "/v1/keys", {"tenant": "root", "label": "x" * 101}, 400, "label"),
        ("POST", "/v1/keys", {"tenant": "root", "expires": 5}, 400, "expires"),
        ("POST", "/v1/keys", {"tenant": "root", "expires": 253_402_300_800}, 400, "expires"),
        ("POST", "/v1/keys", {"tenant": "root", "expires": 10**30}, 400, "expires"),
        ("DELETE", "/v1/keys/000000000000", None, 404, "id"),
        ("GET", "/v1/usage?group_by=colour", None, 400, "group_by"),
        ("GET", "/v1/usage?from=yesterday", None, 400, "from"),
        ("GET", "/v1/usage?format=xml", None, 400, "format"),
    ],
)
async def test_a_refusal_names_the_field(
    method: str, path: str, body: Any, status: int, param: str, fixture: UploadFixture
) -> None:
    async with fixture.client(fixture.key("root", "admin")) as admin:
        answer = await admin.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_whoever_is_no_admin_may_not_administer(fixture: UploadFixture) -> None:
    fixture.key("root", "admin")
    async with fixture.client(fixture.key("ann")) as ann:
        for method, path in (
            ("GET", "/v1/tenants"),
            ("POST", "/v1/tenants"),
            ("PATCH", "/v1/tenants/ann"),
            ("DELETE", "/v1/tenants/root"),
            ("GET", "/v1/keys"),
            ("POST", "/v1/keys"),
        ):
            assert (await ann.request(method, path, json={})).status_code == 403
