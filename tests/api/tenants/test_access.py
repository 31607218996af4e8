"""Who comes in."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.settings import ApiSettings
from personae.api.tenants.access import is_open

pytestmark = pytest.mark.anyio
ADMINS = {
    "/metrics",
    "/v1/stats",
    "/v1/stats/history",
    "/v1/replicas",
    "/v1/eval_reports",
    "/v1/eval_reports/none",
    "/v1/eval_reports/none/page",
    "/v1/eval_reports/none/cancel",
    "/v1/eval_reports/none/against/none",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/tenants",
    "/v1/tenants/mine",
    "/v1/keys",
    "/v1/keys/none",
    "/v1/keys/none/rotate",
}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path) as fixture:
        yield fixture


def every_route(fixture: UploadFixture) -> list[tuple[str, str]]:
    """Method and path of all routes that the app has, and some that it has not."""
    found = []
    for route in fixture.app.routes:
        assert isinstance(route, Route), f"{route} is of a kind that this test cannot see into"
        path = route.path.replace("{id:path}", "base").replace("{name}", "mine").replace("{id}", "none")
        path = path.replace("{item_id}", "none").replace("{other}", "none")
        assert "{" not in path
        found += [(method, path) for method in route.methods or ()]
    assert len(found) > 15
    return [*found, ("GET", "/nowhere"), ("PUT", "/v1/adapters"), ("POST", "/"), ("GET", "/health/")]


def ask(client: httpx.AsyncClient, method: str, path: str) -> httpx.Request:
    return client.build_request(method, path, json={} if method in ("POST", "PUT") else None)


def wrong_headers(fixture: UploadFixture) -> list[dict[str, str]]:
    key, revoked = fixture.key("ann"), fixture.key("ann")
    fixture.tenants.revoke_key(revoked)
    gone = fixture.key("carl", "admin")
    fixture.tenants.revoke_tenant("carl")
    forged = key[:-1] + ("0" if key[-1] != "0" else "1")
    return [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {key}"},
        {"authorization": key},
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {key}"},
        {"x-api-key": forged},
        *({"authorization": f"Bearer {wrong}"} for wrong in (forged, revoked, gone, key + "x", "psn_")),
    ]


async def test_every_route_but_the_probes_is_closed_to_whoever_has_no_valid_key(
    fixture: UploadFixture,
) -> None:
    routes, headers = every_route(fixture), wrong_headers(fixture)
    async with fixture.client() as client:
        for method, path in routes:
            for wrong in headers:
                request = ask(client, method, path)
                request.headers.update(wrong)
                response = await client.send(request)
                if is_open(path):
                    served = 404 if path.startswith("/console/") else 200
                    assert response.status_code == served or method not in ("GET", "HEAD")
                    continue
                assert response.status_code == 401, (method, path, wrong)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"
    assert fixture.engine.submitted == []


async def test_a_tenants_key_opens_every_route_but_those_of_admins(fixture: UploadFixture) -> None:
    tenant, admin = fixture.key("ann"), fixture.key("root", "admin")
    async with fixture.client(tenant) as mine, fixture.client(admin) as full:
        for method, path in every_route(fixture):
            status = (await mine.send(ask(mine, method, path))).status_code
            above = (await full.send(ask(full, method, path))).status_code
            assert status != 401
            assert above not in (401, 403)
            if path in ADMINS:
                assert status == (403 if above != 405 else 405), (method, path)
            else:
                assert status != 403, (method, path)


async def test_a_key_that_is_wrong_and_one_that_may_not_are_errors_of_their_own_types(
    fixture: UploadFixture,
) -> None:
    """LiteLLM takes whatever says `invalid_request_error` for a 400: no other deployment is asked then."""
    tenant = fixture.key("ann")
    async with fixture.client() as stranger, fixture.client(tenant) as mine:
        unknown = (await stranger.get("/v1/models")).json()["error"]
        refused = (await mine.get("/metrics")).json()["error"]
    assert (unknown["type"], refused["type"]) == ("authentication_error", "permission_error")


async def test_another_tenants_adapter_is_the_same_404_as_none(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann")) as ann, fixture.client(fixture.key("bob")) as bob:
        assert (await upload(ann, "mine", whole())).status_code == 201
        assert (await bob.get("/v1/adapters")).json()["data"] == []
        assert "mine" not in (await bob.get("/v1/models")).text
        for method, path, body in (
            ("GET", "/v1/adapters/{}", None),
            ("DELETE", "/v1/adapters/{}", None),
            ("GET", "/v1/models/{}", None),
            ("POST", "/v1/completions", {"prompt": "hi"}),
            ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("POST", "/tokenize", {"prompt": "hi"}),
            ("POST", "/detokenize", {"tokens": [1]}),
        ):
            answers = []
            for name in ("mine", "none"):
                response = await bob.request(
                    method, path.format(name), json=None if body is None else {"model": name, **body}
                )
                answers.append((response.status_code, response.text.replace(name, "NAME")))
            assert answers[0] == answers[1]
            assert answers[0][0] == 404, (method, path)
        assert (await ann.get("/v1/adapters/mine")).status_code == 200


async def test_as_long_as_there_never_was_a_key_everybody_is_the_default_tenant(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        assert (await client.get("/metrics")).status_code == 200
        await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
        assert fixture.engine.submitted[0].tenant == "default"
        key = fixture.key("ann")
        assert (await client.get("/v1/models")).status_code == 401, "at once, without a restart"
        fixture.tenants.revoke_key(key)
        assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_web_pages_cannot_use_a_server_without_keys(fixture: UploadFixture, site: str) -> None:
    async with fixture.client() as client:
        client.headers["sec-fetch-site"] = site
        assert (await upload(client, "evil", whole())).status_code == 403
        client.headers["sec-fetch-site"] = "none"
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3000", "http://127.0.0.1", "null", "", "localhost"]
)
async def test_an_origin_that_is_not_the_servers_own_is_refused_without_keys(
    fixture: UploadFixture, origin: str
) -> None:
    """A page's browser may be too old for `Sec-Fetch-Site`, or a proxy may have dropped it."""
    body = {"model": "base", "prompt": "hi"}
    async with fixture.client() as client:
        refused = await client.post("/v1/completions", json=body, headers={"origin": origin})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        for host, own in (("localhost", "http://localhost"), ("127.0.0.1:8000", "HTTP://127.0.0.1:8000")):
            headers = {"host": host, "origin": own}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    async with fixture.client(fixture.key("ann")) as client:
        asked = await client.post("/v1/completions", json=body, headers={"origin": origin})
        assert asked.status_code == 200, "a key says who asks"


@pytest.mark.parametrize("keys", [False, True])
async def test_pages_of_an_allowed_origin_can_ask_and_read_what_they_are_told(
    tmp_path: Path, keys: bool
) -> None:
    page = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    with open_fixture(tmp_path, settings=ApiSettings(allowed_origin=("https://app.example",))) as fixture:
        key = fixture.key("ann") if keys else None
        async with fixture.client() as client:
            before = await client.options("/v1/chat/completions", headers=page | preflight)
            assert before.status_code == 200
            assert before.headers["access-control-allow-origin"] == "https://app.example"
            assert "authorization" in before.headers["access-control-allow-headers"]
            refused = await client.post("/v1/nope", headers=page)
            assert refused.status_code == (401 if keys else 404)
            assert refused.headers["access-control-allow-origin"] == "https://app.example"
            assert "x-request-id" in refused.headers["access-control-expose-headers"]
        async with fixture.client(key) as client:
            assert (await client.get("/v1/models", headers=page)).status_code == 200
            other = await client.get("/v1/models", headers=page | {"origin": "https://evil.example"})
            assert other.status_code == (200 if keys else 403)
            assert "access-control-allow-origin" not in other.headers


async def test_without_allowed_origins_no_page_is_told_anything(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann")) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://app.example"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_name_that_leads_here_opens_nothing_without_keys(
    fixture: UploadFixture, tmp_path: Path
) -> None:
    async with fixture.client() as client:
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "[::",
        ):
            refused = await client.get("/v1/models", headers={"host": host})
            assert refused.status_code == 403, host
            assert "localhost" in refused.json()["error"]["message"]
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "192.168.1.7", "[::1]:8000", "[::1]"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
    async with fixture.client(fixture.key("ann")) as client:
        assert (await client.get("/v1/models", headers={"host": "llm.example"})).status_code == 200
    with open_fixture(tmp_path / "other", settings=ApiSettings(insecure_no_auth=True)) as open_to_all:
        async with open_to_all.client() as client:
            assert (await client.get("/v1/models", headers={"host": "llm.example"})).status_code == 200


async def test_insecure_asks_for_no_key_though_there_are_some(tmp_path: Path) -> None:
    with open_fixture(tmp_path, settings=ApiSettings(insecure_no_auth=True)) as fixture:
        fixture.key("ann")
        async with fixture.client() as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_a_sequence_carries_its_tenant_and_that_tenants_salt(fixture: UploadFixture) -> None:
    for tenant in ("ann", "bob"):
        async with fixture.client(fixture.key(tenant)) as client:
            await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
    found = [(log.tenant, log.salt.partition(b"~")[0]) for log in fixture.engine.submitted]
    assert found == [("ann", b"ann"), ("bob", b"bob")]


async def test_limits_are_429_with_the_time_to_come_back(fixture: UploadFixture) -> None:
    body = {"model": "base", "prompt": "hi"}
    few = fixture.key("few", requests_per_minute=2)
    async with fixture.client(few) as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert 10 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for path in ("/health", "/v1/models", "/version"):
            assert (await client.get(path)).status_code == 200, "looking is free"
    async with fixture.client(fixture.key("short", tokens_per_minute=12)) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200  # 2 and 14 tokens
        for stream in (False, True):
            refused = await client.post("/v1/completions", json=body | {"stream": stream})
            assert refused.status_code == 429
            assert 10 <= int(refused.headers["retry-after"]) <= 30
    async with fixture.client(fixture.key("none", concurrent=0)) as client:
        assert (await client.get("/v1/models")).status_code == 429


async def test_a_limit_is_free_again_when_requests_fail_or_end(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann", concurrent=1)) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json={})).status_code == 400
            asked = {"model": "base", "prompt": "hi", "stream": True}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
