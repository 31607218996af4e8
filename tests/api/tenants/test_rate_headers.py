"""The headers that say what is left of a tenant's limits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.tenants.limits import TokenBucket, duration

pytestmark = pytest.mark.anyio
BODY = {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data") as fixture:
        yield fixture


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_streams_and_refusals_say_what_is_left(fixture: UploadFixture, stream: bool) -> None:
    key = fixture.key("ann", requests_per_minute=2, tokens_per_minute=6000)
    async with fixture.client(key) as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "stream": stream})
        assert answer.status_code == 200
        limits = {name: answer.headers[f"x-ratelimit-{name}"] for name in ("limit-requests", "limit-tokens")}
        assert limits == {"limit-requests": "2", "limit-tokens": "6000"}
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 6000
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        bad = await client.post("/v1/chat/completions", json={"messages": 1})
        assert (bad.status_code, bad.headers["x-ratelimit-remaining-requests"]) == (400, "0")
        refused = await client.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
        assert "x-ratelimit-limit-requests" not in (await client.get("/v1/models")).headers


async def test_without_a_limit_of_tokens_there_are_no_headers_of_tokens(fixture: UploadFixture) -> None:
    async with fixture.client(fixture.key("ann")) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert answer.headers["x-ratelimit-limit-requests"] == "30000"
        assert "x-ratelimit-limit-tokens" not in answer.headers
    async with fixture.client("wrong") as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert (answer.status_code, "x-ratelimit-limit-requests" in answer.headers) == (401, False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0191, "20ms"), (1, "1s"), (7.66, "7.66s"), (59.999, "1m0s"), (90.5, "1m30.5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bucket_in_debt_has_nothing_left_and_takes_longer_to_fill() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90)
    assert bucket.state(0.0) == (0, 90.0)
    assert bucket.state(45.0) == (15, 45.0)
    assert TokenBucket(0, 0.0).state(5.0) == (0, 0.0)


async def test_an_admin_uploads_for_a_tenant_within_its_limits(fixture: UploadFixture) -> None:
    root, ann = fixture.key("root", "admin"), fixture.key("ann", adapters=1)
    async with fixture.client(root) as full, fixture.client(ann) as mine:
        full.params = {"tenant": "ann"}
        assert (await upload(full, "poet", whole(1))).status_code == 201
        assert (await upload(full, "other", whole(2))).status_code == 429, "her limit"
        full.params = {}
        assert (await full.get("/v1/adapters")).json()["data"] == []
        assert [one["name"] for one in (await mine.get("/v1/adapters")).json()["data"]] == ["poet"]
        full.params = {"tenant": "nobody"}
        assert (await upload(full, "poet", whole(1))).status_code == 404
        mine.params = {"tenant": "root"}
        refused = await upload(mine, "poet", whole(1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "tenant")
    assert fixture.leftovers() == []
