"""Engines download adapters from the frontend to their own disk, by the digest of the content."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import SocketStream
from patience import PATIENCE
from tiny_adapters import ZOO, make_adapter_folder
from tiny_models import model_folder

from personae.actors.assembly import assemble
from personae.actors.cluster.adapter_cache import AdapterCache
from personae.actors.cluster.adapter_files import AdapterFiles
from personae.actors.cluster.contact import Contact
from personae.actors.cluster.files import AllSent, FileBegins, FileEnds, Piece
from personae.actors.framing import frame
from personae.actors.line import Line
from personae.actors.options import EngineOptions
from personae.errors import AdapterError, LineBroken
from personae.lora.library import AdapterLibrary

pytestmark = pytest.mark.anyio
DIGESTS = [f"{number:064x}" for number in range(9)]


def write(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "secret.txt").write_bytes(b"not an adapter's")
    return folder


async def in_thread(do: Callable[[], Any]) -> Any:
    with anyio.fail_after(PATIENCE):
        return await to_thread.run_sync(do, abandon_on_cancel=True)


@asynccontextmanager
async def cache_of(source: AdapterFiles, cache: Path, bound: int = 2**20) -> AsyncIterator[AdapterCache]:
    """An engine's cache that downloads from this source."""
    ours, theirs = socket.socketpair()
    line = Line(theirs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.serve, await SocketStream.from_socket(ours))
        yield AdapterCache(Contact(adapters=source.keys, cache=str(cache), cache_bytes=bound), line)
        line.close()


async def test_exactly_the_files_of_an_adapter_are_downloaded(anyio_backend, tmp_path) -> None:
    weights = bytes(range(256)) * 4000
    write(tmp_path / "store" / DIGESTS[1], weights)
    async with cache_of(AdapterFiles({}, tmp_path / "store"), tmp_path / "cache") as cache:
        await in_thread(partial(cache.fetch, DIGESTS[1]))
        await in_thread(partial(cache.fetch, DIGESTS[1]))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [DIGESTS[1]]
    got = {path.name: path.read_bytes() for path in (tmp_path / "cache" / DIGESTS[1]).iterdir()}
    assert got == {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}


@pytest.mark.parametrize("key", ["../store", "", "x" * 64, DIGESTS[1] + "/..", "files-x"])
async def test_a_name_that_is_not_a_digest_is_neither_requested_nor_answered(
    anyio_backend, tmp_path, key: str
) -> None:
    write(tmp_path / "store" / "x" / "y")
    source = AdapterFiles({}, tmp_path / "store")
    async with cache_of(source, tmp_path / "cache") as cache:
        with pytest.raises(AdapterError, match="is not a digest"):
            await in_thread(partial(cache.fetch, key))
    assert source._folder(key) is None


async def test_an_adapter_that_the_frontend_does_not_have_is_refused_and_the_next_one_is_sent(
    anyio_backend, tmp_path
) -> None:
    write(tmp_path / "store" / DIGESTS[2])
    async with cache_of(AdapterFiles({}, tmp_path / "store"), tmp_path / "cache") as cache:
        with pytest.raises(AdapterError, match="the frontend does not have it"):
            await in_thread(partial(cache.fetch, DIGESTS[1]))
        await in_thread(partial(cache.fetch, DIGESTS[2]))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [DIGESTS[2]]


async def test_the_least_recently_used_adapters_are_removed_when_the_cache_is_full(
    anyio_backend, tmp_path
) -> None:
    for digest in DIGESTS:
        write(tmp_path / "store" / digest, bytes(1000))
    (tmp_path / "store" / DIGESTS[8] / "adapter_model.safetensors").write_bytes(bytes(5000))
    async with cache_of(AdapterFiles({}, tmp_path / "store"), tmp_path / "cache", 3500) as cache:
        for digest in DIGESTS[:3]:
            await in_thread(partial(cache.fetch, digest))
            await anyio.sleep(0.02)  # the times of folders are coarse
        cache.used(DIGESTS[0])
        await in_thread(partial(cache.fetch, DIGESTS[3]))
        kept = {path.name for path in (tmp_path / "cache").iterdir()}
        assert kept == {DIGESTS[0], DIGESTS[2], DIGESTS[3]}
        with pytest.raises(AdapterError, match=r"may hold 3\.4KiB, and the adapter does not fit"):
            await in_thread(partial(cache.fetch, DIGESTS[8]))
        await in_thread(partial(cache.fetch, DIGESTS[4]))


async def test_adapters_known_at_the_start_are_not_removed_while_an_engine_has_them(
    anyio_backend, tmp_path
) -> None:
    for digest in DIGESTS[:3]:
        write(tmp_path / "store" / digest, bytes(1000))
    named = {"first": write(tmp_path / "named" / "first", b"1" * 1000)}
    source = AdapterFiles(named, tmp_path / "store")
    options = EngineOptions(tmp_path / "model", (tmp_path / "named",), tmp_path / "store")
    async with cache_of(source, tmp_path / "cache", 2500) as cache:
        provided = await in_thread(partial(cache.provide, options))
        ((name, folder),) = provided.named_adapters
        assert name == "first"
        assert (folder / "adapter_model.safetensors").read_bytes() == b"1" * 1000
        assert provided.adapter_store == tmp_path / "cache"
        for digest in DIGESTS[:3]:
            await in_thread(partial(cache.fetch, digest))
        assert (folder / "adapter_model.safetensors").is_file()
        assert (tmp_path / "cache" / DIGESTS[2]).is_dir()
        assert not (tmp_path / "cache" / DIGESTS[0]).exists()


async def test_files_that_are_damaged_in_transit_are_not_kept(anyio_backend, tmp_path) -> None:
    ours, theirs = socket.socketpair()
    cache = AdapterCache(Contact(cache=str(tmp_path / "cache")), Line(theirs))
    for message in (FileBegins("adapter_config.json", 2), Piece(b"{}"), FileEnds("0" * 64), AllSent()):
        ours.sendall(frame(message))
    with ours, theirs, pytest.raises(AdapterError, match="damaged in transit"):
        await in_thread(partial(cache.fetch, DIGESTS[1]))
    assert list((tmp_path / "cache").iterdir()) == []


async def test_a_frontend_that_disappears_while_it_sends_ends_the_engine_not_the_request(
    anyio_backend, tmp_path
) -> None:
    ours, theirs = socket.socketpair()
    cache = AdapterCache(Contact(cache=str(tmp_path / "cache")), Line(theirs))
    ours.sendall(frame(FileBegins("adapter_config.json", 2)) + frame(Piece(b"{")))
    ours.close()
    with theirs, pytest.raises(ConnectionError):
        await in_thread(partial(cache.fetch, DIGESTS[1]))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["../../evil", "adapter_model.bin"])
async def test_a_file_that_was_not_requested_is_not_written(anyio_backend, tmp_path, name: str) -> None:
    ours, theirs = socket.socketpair()
    cache = AdapterCache(Contact(cache=str(tmp_path / "cache")), Line(theirs))
    ours.sendall(frame(FileBegins(name, 2)) + frame(Piece(b"{}")))
    with ours, theirs, pytest.raises(LineBroken, match="that was not requested"):
        await in_thread(partial(cache.fetch, DIGESTS[1]))
    assert list((tmp_path / "cache").iterdir()) == []


async def test_files_that_do_not_match_their_digest_are_refused_and_removed(anyio_backend, tmp_path) -> None:
    base = model_folder("qwen3")
    make_adapter_folder(tmp_path / "one", base, **ZOO[next(iter(ZOO))])
    shapes = assemble(EngineOptions(base, device="cpu", kv_memory=2**20)).engine_spec.library._shapes  # type: ignore[attr-defined]
    (tmp_path / "store").mkdir()
    (tmp_path / "one").rename(tmp_path / "store" / DIGESTS[1])
    async with cache_of(AdapterFiles({}, tmp_path / "store"), tmp_path / "cache") as cache:
        library = AdapterLibrary(shapes, {}, tmp_path / "cache", 2**30, fetcher=cache)
        with pytest.raises(AdapterError, match="do not match its digest"):
            await in_thread(partial(library.read, DIGESTS[1]))
        assert list((tmp_path / "cache").iterdir()) == []
