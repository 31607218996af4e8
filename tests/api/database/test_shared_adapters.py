"""An adapter that is uploaded through one server, and the other servers with the same object store."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from patience import soon
from uploads import CONFIG, TENSORS, UploadFixture, open_fixture, upload, whole

from personae.api.object_store import ObjectStore
from personae.api.tenants.data import CACHE_BYTES, DataDir

pytestmark = pytest.mark.anyio
Serve = Callable[..., UploadFixture]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def serve(url: str, tmp_path: Path) -> Iterator[Serve]:
    """Opens another server with the same database and, unless it is told not to, the same object store."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    with ExitStack() as stack:

        def one_more(name: str, cache_bytes: int = CACHE_BYTES, *, alone: bool = False) -> UploadFixture:
            objects = None if alone else ObjectStore(f"file://{tmp_path}/bucket")
            data = DataDir(tmp_path / name, url, objects=objects, cache_bytes=cache_bytes)
            return stack.enter_context(open_fixture(tmp_path / name, opened=data))

        yield one_more


async def ask(server: UploadFixture, model: str) -> httpx.Response:
    async with server.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        return await client.post("/v1/chat/completions", json=body)


async def add(server: UploadFixture, others: list[UploadFixture], name: str, seed: int = 0) -> str:
    """Upload an adapter, and wait until the others know of it. Returns its digest."""
    async with server.client() as client:
        created = await upload(client, name, whole(seed))
        assert created.status_code == 201, created.text
    for each in others:
        await soon(lambda each=each: each.registry.find("default", name) is not None, "all know it")  # type: ignore[misc]
    return str(created.json()["sha256"])


async def test_an_adapter_that_one_server_took_is_served_by_another(serve: Serve) -> None:
    one, two = serve("one"), serve("two")
    digest = await add(one, [two], "poet")
    folder = two.data.adapters / digest
    assert not folder.exists(), "it is fetched when somebody asks for it"
    for _ in range(2):
        answer = await ask(two, "poet")
        assert answer.status_code == 200, answer.text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole()
    async with two.client() as client:
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
    await soon(lambda: one.registry.find("default", "poet") is None, "it is gone everywhere")
    assert not serve("three").data.objects.has(f"adapters/{digest}")  # type: ignore[union-attr]


async def test_the_store_keeps_an_adapter_that_another_name_needs(serve: Serve) -> None:
    one, two = serve("one"), serve("two")
    digest = await add(one, [two], "poet")
    assert await add(one, [two], "bard") == digest
    async with one.client() as client:
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
    assert (await ask(two, "bard")).status_code == 200


@pytest.mark.parametrize("damage", [TENSORS, CONFIG, "manifest.json"])
async def test_a_damaged_adapter_is_refused_and_served_once_it_is_whole(
    serve: Serve, tmp_path: Path, damage: str
) -> None:
    one, two = serve("one"), serve("two")
    digest = await add(one, [two], "poet")
    file = tmp_path / "bucket" / "adapters" / digest / damage
    intact = file.read_bytes()
    file.write_bytes(intact[:-1])
    answer = await ask(two, "poet")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
    assert "damaged" in answer.json()["error"]["message"]
    assert (await ask(one, "poet")).status_code == 200, "who has it does not ask the store"
    file.write_bytes(intact)
    assert (await ask(two, "poet")).status_code == 200


async def test_without_an_object_store_the_answer_says_where_the_files_are(serve: Serve) -> None:
    one, two = serve("one", alone=True), serve("two", alone=True)
    await add(one, [two], "poet")
    assert (await ask(one, "poet")).status_code == 200
    answer = await ask(two, "poet")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
    assert "at another server" in answer.json()["error"]["message"]


async def test_a_server_keeps_no_more_adapters_than_fit_and_none_goes_that_is_in_use(serve: Serve) -> None:
    size = sum(map(len, whole().values()))
    one, two = serve("one"), serve("two", int(size * 2.5))
    digests = [await add(one, [two], f"poet-{seed}", seed) for seed in range(4)]
    with two.registry.files.hold(digests[0]):
        for seed in range(4):
            assert (await ask(two, f"poet-{seed}")).status_code == 200
        here = {path.name for path in two.data.adapters.iterdir()} & set(digests)
        assert digests[0] in here
        assert digests[3] in here
        assert len(here) == 2
    assert (await ask(two, "poet-1")).status_code == 200
