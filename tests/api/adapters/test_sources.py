"""Adapters that the server fetches: from a server that speaks the Hub's API, from S3, and from a folder."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import FIRST, SECOND, FakeHub
from programs import Program
from s3 import BUCKET, S3Server, s3_server
from uploads import CONFIG, TENSORS, UploadFixture, open_fixture, whole

from personae.api.adapters.sources.fetch import FetchFailed, FetchJob
from personae.api.adapters.sources.fetching import fetched
from personae.api.adapters.sources.url import allowed_prefix, check_prefixes, parse_source
from personae.api.settings import ApiSettings
from personae.errors import Forbidden, RequestError

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def serving(folder: Path, *prefixes: str, **settings: Any) -> Any:
    return open_fixture(folder / "data", settings=ApiSettings(adapter_source=prefixes, **settings))


async def ask_for(fixture: UploadFixture, source: str, **fields: Any) -> httpx.Response:
    async with fixture.client() as client:
        return await client.post("/v1/adapters", json={"source": source, **fields}, timeout=60)


async def refused(
    fixture: UploadFixture, source: str, status: int, said: str, code: str | None = None
) -> None:
    """One sentence that names the field, and nothing is left."""
    answer = await ask_for(fixture, source, name="poet")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"], error
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert error["param"] == "source"
    assert code in (None, error["code"])
    assert fixture.registry.count() == 0
    assert fixture.leftovers() == []


async def test_an_adapter_comes_from_the_hub_at_its_commit_and_answers(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("org/poet", whole(1))
    hub.add("org/poet", {f"checkpoint-5/{name}": data for name, data in whole(2).items()}, SECOND, "v2/rc")
    with serving(tmp_path, "hf://org") as fixture:
        answer = await ask_for(fixture, "hf://org/poet")
        assert answer.status_code == 201, answer.text
        record = answer.json()
        assert (record["name"], record["version"], record["source"]) == ("poet", 1, f"hf://org/poet@{FIRST}")
        inner = await ask_for(fixture, "hf://org/poet@v2%2Frc/checkpoint-5", name="poet", replace=True)
        assert inner.status_code == 201, inner.text
        assert inner.json()["source"] == f"hf://org/poet@{SECOND}/checkpoint-5"
        assert inner.json()["version"] == 2
        async with fixture.client() as client:
            body = {"model": "poet", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert fixture.engine.submitted[-1].adapter == inner.json()["sha256"]
        assert fixture.leftovers() == []


FETCH = """
import sys, tempfile
import msgspec
from personae.api.adapters.sources.fetch import FetchJob
from personae.api.adapters.sources.fetching import bound_files, fetched
from personae.api.adapters.sources.url import parse_source
bound_files(2**20)
prefix, most = parse_source("hf://org/x"), int(sys.argv[1])
prefix = msgspec.structs.replace(prefix, parts=("org",))
for text in sys.argv[2:]:
    with tempfile.TemporaryDirectory() as folder:
        print(msgspec.json.encode(fetched(FetchJob(parse_source(text), prefix, folder, most, 60))).decode())
"""


def test_what_the_hub_lacks_or_refuses_is_one_sentence(
    tmp_path: Path, hub: FakeHub, anyio_backend: str
) -> None:
    hub.add("org/poet", whole(1))
    hub.add("org/gated", whole(1)).locked = (403, "GatedRepo")
    hub.add("org/failing", whole(1)).locked = (500, "Other")
    hub.add("org/pickle", {CONFIG: b"{}", "adapter_model.bin": b"x"})
    hub.add("org/empty", {"README.md": b""})
    hub.add("org/large", {CONFIG: whole(1)[CONFIG], TENSORS: bytes(20_001)})
    hub.add("org/long", {CONFIG: bytes(2**20 + 1), TENSORS: b""})
    hub.add("elsewhere/secret", whole(1))
    hub.moved["org/moved"] = "elsewhere/secret"
    hub.add("org/liar", {CONFIG: whole(1)[CONFIG], TENSORS: bytes(2**21)})
    hub.sizes["org/liar"] = 100
    said = {
        "hf://org/none": ("not_found", "There is no repository org/none at http"),
        "hf://org/poet@v9": ("not_found", "org/poet has no branch, tag or commit 'v9'."),
        "hf://org/poet/inner": ("not_found", "`hf://org/poet/inner` has no adapter_config.json."),
        "hf://org/empty": ("not_found", "`hf://org/empty` has no adapter_config.json."),
        "hf://org/pickle": ("not_found", f"`hf://org/pickle` has no {TENSORS}. Its weights are pickles,"),
        "hf://org/gated": ("forbidden", "org/gated is gated: the server's operator must ask for access at"),
        "hf://org/failing": ("failed", f"{hub.url} refused org/failing with status 500."),
        "hf://org/large": ("too_large", f"`{TENSORS}` of `hf://org/large` has more than 19.5KiB."),
        "hf://org/long": ("too_large", f"`{CONFIG}` of `hf://org/long` has more than 1MiB."),
        "hf://org/liar": ("too_large", "A file of `hf://org/liar` has more than 19.5KiB."),
        "hf://org/moved": ("forbidden", "org/moved has moved to elsewhere/secret, which is not below"),
    }
    with Program("-c", FETCH, "20000", *said) as program:
        lines = program.end(0).splitlines()
    for source, line in zip(said, lines, strict=True):
        answer = json.loads(line)
        kind, sentence = said[source]
        assert answer["type"] == "FetchFailed", source
        assert answer["kind"] == kind, answer
        assert answer["message"].startswith(sentence), answer
        assert "\n" not in answer["message"]
    assert not any("elsewhere" in path and "/resolve/" in path for _, path, _ in hub.asked)


def outcome(folder: Path, source: str, prefix: str) -> tuple[str, str]:
    """Why nothing comes, without a process of its own."""
    (into := folder / secrets.token_hex(4)).mkdir()
    job = FetchJob(parse_source(source), parse_source(prefix), str(into), 20_000, 60.0)
    answer = fetched(job)
    assert isinstance(answer, FetchFailed)
    return answer.kind, answer.message


async def test_a_refused_source_changes_nothing(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("org/broken", {CONFIG: b"{", TENSORS: b"x"})
    with serving(tmp_path, "hf://org") as fixture:
        await refused(fixture, "hf://org/none", 404, "There is no repository org/none", "source_not_found")
        broken = await ask_for(fixture, "hf://org/broken")
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_adapter")
        assert fixture.leftovers() == []


async def test_a_hub_that_hangs_holds_a_request_no_longer_than_its_time(tmp_path: Path, hub: FakeHub) -> None:
    hub.silent = True
    with serving(tmp_path, "hf://org", upload_seconds=1.0) as fixture:
        await refused(fixture, "hf://org/poet", 503, "could not be fetched within 1 s", "source_failed")


async def test_only_sources_of_the_list_are_fetched(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("organized/poet", whole(1))
    with serving(tmp_path) as fixture:
        await refused(fixture, "hf://org/poet", 403, "start the server with --adapter-source")
    with serving(tmp_path, "hf://org", "hf://other/one", "file:///srv/adapters") as fixture:
        said = "is not below one of the server's --adapter-source prefixes"
        for source in ("hf://organized/poet", "hf://other/two", "s3://org/poet", "file:///srv/adapters2/x"):
            await refused(fixture, source, 403, said, "source_not_allowed")
    assert hub.asked == []


async def test_a_folder_of_this_machine_is_read_only_below_the_listed_one(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "poet", outside / "secret", root / "linked"):
        folder.mkdir(parents=True)
        for name, data in whole(1).items():
            (folder / name).write_bytes(data)
    (root / "way").symlink_to(outside)
    (root / "linked" / TENSORS).unlink()
    (root / "linked" / TENSORS).symlink_to(outside / "secret" / TENSORS)
    with serving(tmp_path, f"file://{root}") as fixture:
        await refused(fixture, f"file://{root}/way/secret", 403, "is not below", "source_not_allowed")
        for name, kind in (("linked", "failed"), ("none", "not_found")):
            assert outcome(tmp_path, f"file://{root}/{name}", f"file://{root}")[0] == kind
        answer = await ask_for(fixture, f"file://{root}/poet")
        assert (answer.status_code, answer.json()["source"]) == (201, f"file://{root}/poet")


async def test_an_adapter_comes_from_s3(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for name, data in whole(1).items():
        s3.write(f"team/poet/{name}", data)
    s3.write(f"team/half/{CONFIG}", whole(1)[CONFIG])
    s3.write(f"team/large/{CONFIG}", whole(1)[CONFIG])
    s3.write(f"team/large/{TENSORS}", bytes(20_001))
    prefix = f"s3://{BUCKET}/team"
    assert outcome(tmp_path, f"{prefix}/half", prefix) == ("not_found", f"`{prefix}/half` has no {TENSORS}.")
    assert outcome(tmp_path, f"{prefix}/large", prefix)[0] == "too_large"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refusal = ("forbidden", f"The server may not read `{prefix}/poet`.")
    assert outcome(tmp_path, f"{prefix}/poet", prefix) == refusal
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    with serving(tmp_path, prefix) as fixture:
        answer = await ask_for(fixture, f"s3://{BUCKET}/team/poet")
        assert answer.status_code == 201, answer.text
        assert answer.json()["source"] == f"s3://{BUCKET}/team/poet"


BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "source"),
    ({"source": 5}, "source"),
    ({"source": "https://169.254.169.254/latest"}, "source"),
    ({"source": "hf://org/poet", "url": "x"}, "url"),
    ({"source": "hf://org/poet", "name": "a b"}, "name"),
    ({"source": "hf://org/poet", "replace": "yes"}, "replace"),
    ({"source": "hf://org/poet", "base_model": "other"}, "base_model"),
    ({"source": "hf://org/poet", "defaults": {"temperature": 9}}, "defaults.temperature"),
]


@pytest.mark.parametrize(("body", "param"), BODIES)
async def test_a_bad_body_is_a_400_that_names_the_field(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    with serving(tmp_path, "hf://org") as fixture:
        async with fixture.client() as client:
            answer = await client.post("/v1/adapters", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_tenants_key_fetches_for_its_tenant_within_its_limits(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("org/poet", whole(1))
    with serving(tmp_path, "hf://org") as fixture:
        admin, ann = fixture.key("root", "admin"), fixture.key("ann", adapters=0)
        async with fixture.client(ann) as client:
            full = await client.post("/v1/adapters", json={"source": "hf://org/poet"})
            shared = await client.post("/v1/adapters", json={"source": "hf://org/poet", "shared": True})
        assert (full.status_code, shared.status_code) == (429, 403)
        assert hub.asked == []
        fixture.tenants.set_limits("ann", {"adapters": 1})
        async with fixture.client(admin) as client:
            body = {"source": "hf://org/poet"}
            made = await client.post("/v1/adapters", json=body, params={"tenant": "ann"}, timeout=60)
        assert made.status_code == 201, made.text
        assert [(one.tenant, one.name) for one in fixture.registry.own(None)] == [("ann", "poet")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poet",
        "hf:/org/poet",
        "hf://org",
        "hf://org/../etc",
        "hf://org/poet@",
        "hf://org/poet@..%2Fx",
        "hf://org/poet@v1?x=1",
        "hf://org//poet",
        "hf://user:secret@org/poet",
        "s3://bucket",
        "s3://bucket/%2e%2e/x",
        "s3://bucket/a b",
        "file://etc/passwd",
        "file:///",
        "file:///srv/./x",
        "http://localhost/x",
        "HF://org/poet",
        "hf://org/poet\n",
        "hf://" + "a/" * 1000,
    ],
)
def test_what_is_no_source_is_refused(text: str, anyio_backend: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_source(text)
    assert caught.value.param == "source"


@pytest.mark.parametrize(
    "prefix", ["", "hf", "s3://", "file://", "file:///", "hf://org/poet@v1", "ftp://x/y", "s3://a/../b"]
)
def test_a_prefix_that_says_nothing_useful_is_refused(prefix: str, anyio_backend: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        check_prefixes((prefix,))


def test_prefixes_compare_whole_parts_and_hf_alone_is_the_whole_hub(anyio_backend: str) -> None:
    prefixes = check_prefixes(("hf://", "s3://models/team/"))
    assert allowed_prefix(parse_source("hf://any/one@v1"), prefixes).parts == ()
    assert allowed_prefix(parse_source("s3://models/team/x"), prefixes).parts == ("models", "team")
    for outside in ("s3://models/teams/x", "s3://models/x", "gs://models/team/x"):
        with pytest.raises(Forbidden):
            allowed_prefix(parse_source(outside), prefixes)
