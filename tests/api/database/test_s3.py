"""Servers whose contents are in S3: an API that checks signatures and that can be made to fail."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from patience import soon
from programs import Program
from s3 import BUCKET, S3Server, s3_server
from tiny_models import model_folder
from uploads import CONFIG, TENSORS, UploadFixture, open_fixture, upload, whole

from personae.api.files.store import FileStore
from personae.api.object_store import ObjectStore
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity
from personae.errors import LoadError, StorageFailed

URL = f"s3://{BUCKET}/contents"
Serve = Callable[..., UploadFixture]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The API, empty, and its key in the environment."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.heal()
    for path in running.list():
        running.delete(path)
    yield running
    running.heal()


@pytest.fixture
def store(s3: S3Server, tmp_path: Path) -> ObjectStore:
    """An object store with one thing in it."""
    store = ObjectStore(URL)
    (tmp_path / "config").write_bytes(b"{}")
    (tmp_path / "tensors").write_bytes(bytes(range(256)) * 4096)
    store.put("adapters/one", {"config": tmp_path / "config", "tensors": tmp_path / "tensors"})
    return store


@pytest.fixture
def serve(s3: S3Server, url: str, tmp_path: Path) -> Iterator[Serve]:
    """Opens another server with the same database and the same bucket."""
    with ExitStack() as stack:

        def one_more(name: str) -> UploadFixture:
            data = DataDir(tmp_path / name, url, objects=ObjectStore(URL))
            return stack.enter_context(open_fixture(tmp_path / name, opened=data))

        yield one_more


async def ask(server: UploadFixture, model: str) -> httpx.Response:
    async with server.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        return await client.post("/v1/chat/completions", json=body)


async def add(server: UploadFixture, other: UploadFixture, name: str = "poet") -> str:
    """Upload an adapter, and wait until the other server knows of it. Returns its digest."""
    async with server.client() as client:
        created = await upload(client, name, whole())
        assert created.status_code == 201, created.text
    await soon(lambda: other.registry.find("default", name) is not None, "both know it")
    return str(created.json()["sha256"])


def failed(answer: httpx.Response) -> str:
    """The message of an answer that says that the store failed."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed"), answer.text
    return str(answer.json()["error"]["message"])


def test_what_is_put_into_s3_is_got_whole_until_it_is_deleted(
    s3: S3Server, store: ObjectStore, tmp_path: Path
) -> None:
    assert s3.list() == {f"contents/adapters/one/{name}" for name in ("config", "tensors", "manifest.json")}
    assert store.has("adapters/one")
    store.get("adapters/one", tmp_path / "got")
    assert {each.name: each.read_bytes() for each in (tmp_path / "got").iterdir()} == {
        "config": b"{}",
        "tensors": bytes(range(256)) * 4096,
    }
    store.delete("adapters/one")
    assert s3.list() == set()
    assert not store.has("adapters/one")
    with pytest.raises(StorageFailed, match="has no adapters/one"):
        store.get("adapters/one", tmp_path / "again")


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone", "manifest"])
def test_an_object_that_is_not_what_was_put_is_refused_and_leaves_nothing(
    s3: S3Server, store: ObjectStore, tmp_path: Path, damage: str
) -> None:
    path = "contents/adapters/one/" + ("manifest.json" if damage == "manifest" else "tensors")
    data = s3.read(path)
    match damage:
        case "flipped":
            s3.write(path, data[:-1] + bytes([data[-1] ^ 1]))
        case "longer":
            s3.write(path, data * 3)
        case "gone":
            s3.delete(path)
        case _:
            s3.write(path, data[:-1])
    with pytest.raises(StorageFailed, match=r"damaged|missing"):
        store.get("adapters/one", tmp_path / "got")
    assert {each.name for each in tmp_path.iterdir()} == {"config", "tensors"}


def test_two_answers_that_ask_for_patience_are_tried_again(
    s3: S3Server, store: ObjectStore, tmp_path: Path
) -> None:
    s3.fail(503, times=2)
    store.get("adapters/one", tmp_path / "got")
    s3.fail(500, times=2)
    store.put("adapters/two", {"config": tmp_path / "config"})
    s3.heal()
    assert store.has("adapters/two")


@pytest.mark.parametrize("status", [500, 503])
def test_an_s3_that_goes_on_failing_is_a_failure_that_may_pass(
    s3: S3Server, store: ObjectStore, tmp_path: Path, status: int
) -> None:
    s3.fail(status)
    for work in (
        lambda: store.get("adapters/one", tmp_path / "got"),
        lambda: store.has("adapters/one"),
        lambda: store.put("adapters/two", {"config": tmp_path / "config"}),
    ):
        with pytest.raises(StorageFailed, match=r"^The object store failed: [^\n]+\. Try again later\.$"):
            work()
    assert not (tmp_path / "got").exists()
    s3.heal()
    assert not store.has("adapters/two")
    store.get("adapters/one", tmp_path / "got")


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "bucket"])
def test_a_key_or_a_bucket_that_is_wrong_is_one_sentence_without_the_key(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    url = "s3://elsewhere/contents" if wrong == "bucket" else URL
    if wrong != "bucket":
        monkeypatch.setenv(wrong, "A" * len(s3.environment[wrong]))
    with pytest.raises(LoadError, match=rf"^--object-store {url} cannot be used: [^\n]*\.$") as caught:
        ObjectStore(url)
    assert s3.secret not in caught.value.message


def test_a_server_with_a_wrong_key_does_not_start(s3: S3Server, url: str, tmp_path: Path) -> None:
    arguments = ("--data-dir", str(tmp_path / "d"), "--database-url", url, "--object-store", URL)
    command = ("-m", "personae", "serve", str(model_folder("qwen3")), "--port", "0", "--device", "cpu")
    with Program(*command, *arguments, env={"AWS_SECRET_ACCESS_KEY": "wrong"}) as program:
        program.end(2)
        assert f"error: --object-store {URL} cannot be used: " in program.errors


@pytest.mark.anyio
async def test_an_adapter_that_one_server_took_is_served_by_another_from_s3(
    s3: S3Server, serve: Serve
) -> None:
    one, two = serve("one"), serve("two")
    digest = await add(one, two)
    folder = two.data.adapters / digest
    assert not folder.exists(), "it is fetched when somebody asks for it"
    assert (await ask(two, "poet")).status_code == 200
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole()
    async with two.client() as client:
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
    assert s3.list() == set()


@pytest.mark.anyio
@pytest.mark.parametrize("file", [CONFIG, TENSORS, "manifest.json"])
async def test_an_adapter_whose_object_is_missing_or_damaged_is_refused_until_it_is_whole(
    s3: S3Server, serve: Serve, file: str
) -> None:
    one, two = serve("one"), serve("two")
    digest = await add(one, two)
    path = f"contents/adapters/{digest}/{file}"
    content = s3.read(path)
    s3.delete(path)
    assert digest in failed(await ask(two, "poet"))
    s3.write(path, content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged" in failed(await ask(two, "poet"))
    assert not (two.data.adapters / digest).exists()
    s3.write(path, content)
    assert (await ask(two, "poet")).status_code == 200


@pytest.mark.anyio
async def test_while_s3_fails_uploads_and_unknown_adapters_get_a_503_and_the_others_work(
    s3: S3Server, serve: Serve
) -> None:
    one, two = serve("one"), serve("two")
    await add(one, two)
    s3.fail(503)
    assert "The object store failed" in failed(await ask(two, "poet"))
    async with two.client() as client:
        assert "The object store failed" in failed(await upload(client, "bard", whole(1)))
    assert two.leftovers() == []
    assert (await ask(one, "poet")).status_code == 200, "whoever has it does not ask the store"
    s3.heal()
    assert (await ask(two, "poet")).status_code == 200
    async with two.client() as client:
        assert (await upload(client, "bard", whole(1))).status_code == 201


@pytest.mark.anyio
async def test_a_files_content_comes_from_s3_to_the_server_that_lacks_it(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        one, two = (DataDir(tmp_path / name, url, objects=ObjectStore(URL)) for name in ("one", "two"))
        stores = [FileStore(each, time.time) for each in (one, two)]
        for each in (*stores, one, two):
            stack.callback(each.close)
        content = b"a line of a batch" * 1000
        with stores[0].stage("default") as folder:
            (folder / "staged").write_bytes(content)
            who = Identity("default", "admin")
            record = await stores[0].add(
                who, folder / "staged", filename="in.jsonl", purpose="batch", seconds=None
            )
        s3.fail(503)
        with pytest.raises(StorageFailed, match="The object store failed"):
            await stores[1].bring(record.id)
        s3.heal()
        assert (await stores[1].bring(record.id)).read_bytes() == content


@pytest.mark.anyio
async def test_a_key_that_is_revoked_while_servers_run_fails_what_needs_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as s3, ExitStack() as stack:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        one, two = (
            stack.enter_context(
                open_fixture(tmp_path / name, opened=DataDir(tmp_path / name, url, objects=ObjectStore(URL)))
            )
            for name in ("one", "two")
        )
        await add(one, two)
        s3.revoke()
        message = failed(await ask(two, "poet"))
        assert "The object store failed" in message
        assert s3.secret not in message
        assert (await ask(one, "poet")).status_code == 200
