"""The registry through its routes: names, versions, owners, files."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from patience import soon
from safetensors.torch import save
from uploads import BOUNDS, CONFIG, SHAPES, TENSORS, UploadFixture, config, open_fixture, upload, whole

from personae.actors.messages import LoadAdapter
from personae.api.settings import ApiSettings
from personae.errors import AdapterError, LoadError, Overloaded, RateLimited
from personae.lora.bounds import AdapterBounds
from personae.lora.library import AdapterLibrary
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes
from personae.lora.source import AdapterSource

pytestmark = pytest.mark.anyio


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data") as fixture:
        yield fixture


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


async def names(client: Any, path: str = "/v1/models") -> list[str]:
    key = "id" if path == "/v1/models" else "name"
    return [entry[key] for entry in (await client.get(path)).json()["data"]]


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """The record as lists have it."""
    return {name: value for name, value in record.items() if name != "defaults"}


async def test_an_upload_is_described_listed_and_a_model(fixture: UploadFixture, tmp_path: Path) -> None:
    files = whole()
    async with fixture.client() as client:
        created = await upload(client, "poet", files, base_model="base")
        assert created.status_code == 201
        record = created.json()
        assert (await client.get("/v1/adapters/poet")).json() == record
        assert (await client.get("/v1/adapters")).json() == {"data": [brief(record)], "object": "list"}
        model = (await client.get("/v1/models/poet")).json()
        assert await names(client) == ["base", "team/pirate", "poet"]
        for method, path in (("GET", "base"), ("GET", "base/versions"), ("PATCH", "base")):
            own = await client.request(method, f"/v1/adapters/{path}", json={"pinned": 1})
            assert (own.status_code, own.json()["error"]["code"]) == (404, "adapter_not_found")
            assert "was not uploaded" in own.json()["error"]["message"]
            assert own.json()["error"]["message"].endswith("/v1/models/base shows it.")
        as_in_sglang = await client.get("/v1/models/base:poet")
        assert as_in_sglang.json()["error"]["message"].endswith("does not exist. Did you mean `poet`?")
    adapter = read_adapter(folder_of(tmp_path / "poet", files), BOUNDS.shapes)
    assert record == {
        "id": record["id"],
        "object": "adapter",
        "name": "poet",
        "version": 1,
        "sha256": adapter.digest,
        "ranks": {"q": 2, "v": 2},
        "targets": ["q_proj", "v_proj"],
        "bytes": sum(map(len, files.values())),
        "created": record["created"],
        "base_model": "base",
        "shared": False,
        "traits": [],
        "invocation": [],
        "versions": [1],
        "pinned": False,
        "keep_loaded": False,
        "source": None,
        "defaults": {},
    }
    assert (model["parent"], model["created"]) == ("base", record["created"])


async def test_a_name_that_is_taken_needs_replace_and_becomes_a_new_version(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        first = (await upload(client, "poet", whole(1))).json()
        refused = await upload(client, "poet", whole(2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        second = (await upload(client, "poet", whole(2), replace="true")).json()
        assert (first["version"], second["version"]) == (1, 2)
        assert len({first["sha256"], second["sha256"]}) == len({first["id"], second["id"]}) == 2
        assert (await client.get("/v1/adapters")).json()["data"] == [brief(second)]
        assert (await client.delete("/v1/adapters/poet")).json()["deleted"] is True
        assert (await client.delete("/v1/adapters/poet")).status_code == 404
    assert fixture.leftovers() == []


@pytest.mark.parametrize("name", ["base", "team/pirate"])
async def test_the_servers_own_names_cannot_be_taken(fixture: UploadFixture, name: str) -> None:
    async with fixture.client() as client:
        refused = await upload(client, name, whole())
    assert refused.status_code in (400, 409)


async def test_the_same_content_under_several_names_is_stored_once_until_the_last_goes(
    fixture: UploadFixture,
) -> None:
    async with fixture.client(fixture.key("ann")) as ann, fixture.client(fixture.key("bob")) as bob:
        digests = [
            (await upload(client, name, whole())).json()["sha256"]
            for client, name in ((ann, "a"), (ann, "b"), (bob, "a"))
        ]
        (digest,) = set(digests)
        for client, name in ((ann, "a"), (bob, "a"), (ann, "b")):
            assert (fixture.data.adapters / digest / TENSORS).is_file()
            await client.delete(f"/v1/adapters/{name}")
        assert not (fixture.data.adapters / digest).exists()


async def test_an_admin_shares_an_adapter_with_everybody_and_a_tenants_own_comes_first(
    fixture: UploadFixture,
) -> None:
    admin, ann = fixture.key("root", "admin"), fixture.key("ann")
    async with fixture.client(admin) as full, fixture.client(ann) as mine:
        refused = await upload(mine, "poet", whole(), shared="true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "shared")
        shared = (await upload(full, "poet", whole(1), shared="true")).json()
        assert shared["shared"] is True
        assert (await mine.get("/v1/adapters/poet")).json() == shared
        assert await names(mine) == ["base", "team/pirate", "poet"]
        assert (await mine.delete("/v1/adapters/poet")).status_code == 404, "it is not hers"
        own = (await upload(mine, "poet", whole(2))).json()
        assert (await mine.get("/v1/adapters/poet")).json() == own
        assert (await mine.get("/v1/adapters")).json()["data"] == [brief(own)]
        assert (await full.get("/v1/adapters")).json()["data"] == [brief(shared)]
        await mine.delete("/v1/adapters/poet")
        assert (await mine.get("/v1/adapters/poet")).json() == shared


async def test_a_tenants_adapters_and_bytes_are_limited(fixture: UploadFixture) -> None:
    size = sum(map(len, whole().values()))
    few = fixture.key("few", adapters=1)
    async with fixture.client(few) as client:
        assert (await upload(client, "a", whole())).status_code == 201
        refused = await upload(client, "b", whole())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        assert (await upload(client, "a", whole(1), replace="true")).status_code == 201
        await client.delete("/v1/adapters/a")
        assert (await upload(client, "b", whole())).status_code == 201
    async with fixture.client(fixture.key("small", bytes=size + 900)) as client:
        assert (await upload(client, "a", whole())).status_code == 201
        assert (await upload(client, "b", whole(1))).status_code == 429
    assert fixture.leftovers() == []


async def test_files_stay_as_long_as_a_request_uses_them(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        digest = (await upload(client, "poet", whole(1))).json()["sha256"]
        folder = fixture.data.adapters / digest
        fixture.engine.hold_after = 2
        async with anyio.create_task_group() as tasks:
            body = {"model": "poet", "prompt": "hi"}
            tasks.start_soon(lambda: client.post("/v1/completions", json=body))
            await soon(lambda: bool(fixture.engine.live), "it is being answered")
            assert fixture.engine.submitted[0].adapter == digest
            new = (await upload(client, "poet", whole(2), replace="true")).json()
            assert (await client.delete("/v1/adapters/poet@1")).status_code == 200
            assert folder.is_dir()
            assert (await client.get("/v1/models/poet")).status_code == 200
            tasks.cancel_scope.cancel()
        assert not folder.exists()
        assert (fixture.data.adapters / new["sha256"]).is_dir()
    assert fixture.leftovers() == []


async def test_a_restart_keeps_what_is_registered_and_sweeps_what_is_not(tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            record = (await upload(client, "poet", whole())).json()
        folder_of(fixture.data.adapters / ("f" * 64), whole(1))
        folder_of(fixture.data.adapters / "staging" / "half", {CONFIG: b"{"})
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            assert (await client.get("/v1/adapters/poet")).json() == record
        assert fixture.leftovers() == []
        assert (fixture.data.adapters / record["sha256"] / TENSORS).read_bytes() == whole()[TENSORS]


async def test_a_directory_serves_one_base_as_long_as_there_are_adapters(tmp_path: Path) -> None:
    other = AdapterBounds(LoraShapes(3, BOUNDS.shapes.sites), 16, 1.0)
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            await upload(client, "poet", whole())
    with pytest.raises(LoadError, match="other shapes"), open_fixture(tmp_path, bounds=other):
        pass
    with open_fixture(tmp_path) as fixture:
        async with fixture.client() as client:
            await client.delete("/v1/adapters/poet")
    with open_fixture(tmp_path, bounds=other):
        pass


async def test_files_that_change_under_their_digest_are_not_served(fixture: UploadFixture) -> None:
    library = AdapterLibrary(BOUNDS.shapes, {}, fixture.data.adapters, 10**6)
    async with fixture.client() as client:
        digest = (await upload(client, "poet", whole(1))).json()["sha256"]
    assert library.take(digest, library.read(digest)).digest == digest
    (fixture.data.adapters / digest / TENSORS).write_bytes(whole(2)[TENSORS])
    with pytest.raises(AdapterError, match="have changed"):
        library.read(digest)


def test_the_library_keeps_what_fits_and_always_the_latest(tmp_path: Path) -> None:
    adapters = [read_adapter(folder_of(tmp_path / f"{i}", whole(i)), BOUNDS.shapes) for i in range(3)]
    library = AdapterLibrary(BOUNDS.shapes, {}, None, 2 * adapters[0].nbytes)
    for adapter in adapters[:2]:
        library.put(adapter)
    source = library.find(adapters[0].digest)
    assert source is not None
    assert library.take(adapters[0].digest, source) is adapters[0]
    library.put(adapters[2])
    assert [library.find(adapter.digest) is not None for adapter in adapters] == [True, False, True]
    tight = AdapterLibrary(BOUNDS.shapes, {}, None, 1)
    for adapter in adapters:
        tight.put(adapter)
    assert [tight.find(adapter.digest) is not None for adapter in adapters] == [False, False, True]


def test_what_is_said_of_an_adapter_can_be_written_down_and_read_from_by_another(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "poet", whole())
    digest = read_adapter(folder, BOUNDS.shapes).digest
    library = AdapterLibrary(BOUNDS.shapes, {digest: folder}, None, 10**6)
    told = LoadAdapter(digest, library.read(digest))
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=LoadAdapter)
    assert heard == LoadAdapter(digest, AdapterSource((str(folder),)))
    other = AdapterLibrary(BOUNDS.shapes, {}, None, 10**6)
    assert other.take(heard.adapter, heard.source).digest == digest
    shutil.rmtree(folder)
    with pytest.raises(AdapterError, match="its files no longer exist"):
        other.take(heard.adapter, heard.source)


def test_what_was_read_is_taken_although_the_cache_has_let_go_of_it(tmp_path: Path) -> None:
    folders = {}
    for number in range(3):
        folder = folder_of(tmp_path / f"{number}", whole(number))
        folders[read_adapter(folder, BOUNDS.shapes).digest] = folder
    library = AdapterLibrary(BOUNDS.shapes, folders, None, 1)
    sources = {digest: library.read(digest) for digest in folders}
    assert library.kept[0] == 1
    for folder in folders.values():
        shutil.rmtree(folder)
    assert [library.take(*told).digest for told in sources.items()] == list(folders)
    first = next(iter(folders))
    with pytest.raises(AdapterError, match="its files no longer exist"):
        library.take(first, sources[first])
    library.read = None  # type: ignore[assignment, method-assign]  # nothing is read any more
    last = list(folders)[-1]
    assert library.find(last) == sources[last]
    library.forget_offered()
    assert library.take(last, sources[last]).digest == last, "it is kept"


@pytest.fixture
def rooted(tmp_path: Path) -> Iterator[tuple[UploadFixture, Path]]:
    root = tmp_path / "root"
    folder_of(root / "poet", whole())
    folder_of(tmp_path / "outside", whole())
    folder_of(root / "broken", {CONFIG: config(use_dora=True), TENSORS: b""})
    folder_of(root / "linked", {CONFIG: config()})
    (root / "linked" / TENSORS).symlink_to(root / "poet" / TENSORS)
    (root / "way-out").symlink_to(tmp_path / "outside")
    folder_of(root / "no-files", {})
    (root / "folders").mkdir()
    (root / "folders" / CONFIG).mkdir()
    with open_fixture(tmp_path / "data", settings=ApiSettings(adapter_root=(root,))) as fixture:
        yield fixture, root


async def test_ten_loads_at_once_wait_for_each_other_and_all_succeed(
    rooted: tuple[UploadFixture, Path],
) -> None:
    fixture, root = rooted
    statuses: dict[str, int] = {}
    async with fixture.client(fixture.key("root", "admin")) as admin:

        async def load(name: str) -> None:
            body = {"lora_name": name, "lora_path": str(root / "poet")}
            statuses[name] = (await admin.post("/v1/load_lora_adapter", json=body)).status_code

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(load, f"poet-{number}")
        assert statuses == {f"poet-{number}": 200 for number in range(10)}
        assert len(await names(admin)) == 12
    assert fixture.leftovers() == []


async def test_a_load_waits_while_uploads_have_all_places(rooted: tuple[UploadFixture, Path]) -> None:
    fixture, root = rooted
    done: list[int] = []
    async with fixture.client(fixture.key("root", "admin")) as admin:

        async def load() -> None:
            body = {"lora_name": "poet", "lora_path": str(root / "poet")}
            done.append((await admin.post("/v1/load_lora_adapter", json=body)).status_code)

        async with anyio.create_task_group() as tasks:
            with ExitStack() as uploads:
                for _ in range(4):
                    uploads.enter_context(fixture.registry.files.stage("root"))
                tasks.start_soon(load)
                await anyio.wait_all_tasks_blocked()
                assert done == []
                assert (await upload(admin, "more", whole())).status_code == 429
        assert done == [200]


async def test_admins_load_from_the_configured_roots_as_vllm_does(rooted: tuple[UploadFixture, Path]) -> None:
    fixture, root = rooted
    async with (
        fixture.client(fixture.key("root", "admin")) as admin,
        fixture.client(fixture.key("ann")) as ann,
    ):
        body = {"lora_name": "poet", "lora_path": str(root / "poet")}
        loaded = await admin.post("/v1/load_lora_adapter", json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert await names(ann) == ["base", "team/pirate", "poet"]
        taken = await admin.post("/v1/load_lora_adapter", json=body)
        assert (taken.status_code, taken.json()["error"]["param"]) == (409, "lora_name")
        assert "`load_inplace` puts" in taken.json()["error"]["message"]
        again = await admin.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
        assert again.status_code == 200
        gone = await admin.post("/v1/unload_lora_adapter", json={"lora_name": "poet", "lora_int_id": 1})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
        missing = await admin.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_name")
        assert await names(ann) == ["base", "team/pirate"]
    assert fixture.leftovers() == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("{root}/../outside", 403),
        ("{root}/way-out", 403),
        ("{root}", 403),
        ("/etc", 403),
        ("relative", 403),
        ("{root}/poet\0", 403),
        ("x" * 5000, 403),
        ("{root}/poet/../../outside", 403),
        ("{root}/linked", 400),
        ("{root}/broken", 400),
        ("{root}/no-files", 400),
        ("{root}/nothing", 400),
        ("{root}/folders", 400),
    ],
)
async def test_no_other_path_is_read(rooted: tuple[UploadFixture, Path], path: str, status: int) -> None:
    fixture, root = rooted
    async with fixture.client() as client:
        body = {"lora_name": "x", "lora_path": path.replace("{root}", str(root))}
        refused = await client.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == status, refused.text
    assert fixture.leftovers() == []
    assert fixture.registry.list("default") == []


async def test_two_uploads_of_one_name_at_the_same_time_make_one_adapter(fixture: UploadFixture) -> None:
    answers: list[int] = []

    async def one(seed: int) -> None:
        async with fixture.client() as client:
            answers.append((await upload(client, "poet", whole(seed))).status_code)

    async with anyio.create_task_group() as tasks:
        for seed in range(4):
            tasks.start_soon(one, seed)
    assert sorted(answers) == [201, 409, 409, 409]
    assert fixture.leftovers() == []


def test_a_tenant_has_so_many_uploads_at_the_same_time_and_the_server_too(fixture: UploadFixture) -> None:
    with ExitStack() as stack:
        for tenant in "abcd":
            for _ in range(4):
                stack.enter_context(fixture.registry.files.stage(tenant))
            with pytest.raises(RateLimited, match="4 uploads"), fixture.registry.files.stage(tenant):
                pass
        with pytest.raises(Overloaded, match="16 uploads"), fixture.registry.files.stage("e"):
            pass
    with fixture.registry.files.stage("a"):
        pass
    assert fixture.leftovers() == []


async def test_a_disk_without_room_for_an_upload_is_told_and_locks_nobody_out(
    fixture: UploadFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, mode: int = 0) -> None:
        raise OSError(28, "No space left on device")

    async with fixture.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", full)
            for _ in range(5):
                refused = await upload(client, "poet", whole())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert (await upload(client, "poet", whole())).status_code == 201


def test_a_library_says_what_it_does_not_have(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(AdapterError, match="its files no longer exist"):
            AdapterLibrary(BOUNDS.shapes, {}, folder, 1).read("0" * 64)


async def test_a_server_that_loads_from_no_folder_says_which_option_it_needs(tmp_path: Path) -> None:
    with open_fixture(tmp_path / "data") as fixture:
        async with fixture.client() as client:
            body = {"lora_name": "poet", "lora_path": str(tmp_path)}
            refused = await client.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 403
    assert "start the server with --adapter-root" in refused.json()["error"]["message"]


def one_layer(rank: int) -> dict[str, bytes]:
    """An adapter of that rank on one module of one layer."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    pair = {f"{name}A.weight": torch.ones(rank, 8), f"{name}B.weight": torch.ones(8, rank)}
    return {CONFIG: config(rank), TENSORS: save(pair)}


async def test_the_quota_counts_what_an_adapter_really_takes(tmp_path: Path) -> None:
    bounds = replace(BOUNDS, stored="F32", shapes=replace(SHAPES, layers=60), max_rank=16)
    files = one_layer(16)
    uploaded = sum(map(len, files.values()))
    with open_fixture(tmp_path / "data", bounds=bounds) as fixture:
        async with fixture.client(fixture.key("ann", bytes=100_000)) as client:
            record = (await upload(client, "poet", files)).json()
            folder = fixture.data.adapters / record["sha256"]
            there = sum(path.stat().st_size for path in folder.iterdir())
            assert record["bytes"] == there > 10 * uploaded
            other = await upload(client, "other", {**files, CONFIG: config(16, lora_alpha=5)})
            assert (other.status_code, other.json()["error"]["code"]) == (429, "quota_exceeded")
            assert "of at most 97.6KiB; " in other.json()["error"]["message"]
            assert (await upload(client, "poet", files, replace="true")).status_code == 201
            assert not fixture.leftovers()
        with fixture.data.write() as db:
            db.execute("update adapters set bytes = ?", (uploaded,))  # as an earlier version counted
    with open_fixture(tmp_path / "data", bounds=bounds) as fixture:
        assert [record.bytes for record in fixture.registry.list("ann")] == [there]


async def test_what_would_not_fit_into_the_quota_is_not_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr("personae.lora.upload.store", lambda _, folder, *__: written.append(folder))
    bounds = replace(BOUNDS, stored="F32", shapes=replace(SHAPES, layers=60))
    with open_fixture(tmp_path / "data", bounds=bounds) as fixture:
        async with fixture.client(fixture.key("ann", bytes=20_000)) as client:
            refused = await upload(client, "poet", one_layer(16))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert not written
