"""Prefixes survive a restart with --kv-disk and --kv-remote, for their tenant, model and tokens only."""

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import anyio
import pytest
from msgspec.structs import replace as replace_log
from page_stores import page_store
from patience import PATIENCE, eventually, soon
from tiny_models import VOCAB, model_folder
from virtual_clock import real_clock

from personae.actors.assembly import assemble
from personae.actors.client import EngineClient
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.engine.object_stores import AsyncObjects
from personae.engine.params import SamplingParams
from personae.engine.plan import PageKey, PageOwner
from personae.engine.sequence import SequenceLog
from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.host_memory import HostTier
from personae.engine.tiers.remote import RemoteTier
from personae.engine.tiers.tier import PageBytes, PageFetch, Tier

pytestmark = real_clock
PROMPT = tuple(random.Random(0).choices(range(4, VOCAB), k=200))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=0)
WHOLE = 192  # tokens of the prompt in full pages
TIER_ONLY = {  # besides the files of tiers, and of pages' names
    "scheduler.py _work_on",
    "scheduler.py _count_later",
    "runner.py _move",
    "sequence_table.py _begin_fetch",
    "running.py missing",
    "running.py store_idle",
    "running.py _store",
    "prefix.py name_of",
    "page_server.py serve_pages",
}


@pytest.fixture(params=["disk", "remote"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Options with which pages are kept."""
    if request.param == "disk":
        return {"kv_disk": tmp_path, "kv_disk_bytes": 2**24}
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    return {"kv_remote": f"file://{tmp_path}", "kv_remote_bytes": 2**24}


async def found(tier: Tier | None) -> Tier:
    """The tier, once it knows what it has."""
    assert isinstance(tier, DiskTier | RemoteTier)
    known = tier.scanned if isinstance(tier, DiskTier) else tier.listed
    await anyio.to_thread.run_sync(known.wait)
    return tier


class Served:
    """What one run of the server answered."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached: int | None = None
        self.hits = self.stored = self.errors = 0


async def serve(options: EngineOptions, salt: bytes = b"ann", *, keeps: bool = True) -> Served:
    """A server starts, answers one request, stores what it computed if it `keeps` any, and stops."""
    assembly, served = assemble(options), Served()
    tier = assembly.engine_spec.tier
    if tier is not None:
        await found(tier)
    log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, salt=salt)
    async with open_in_process(assembly.engine_spec) as client:
        async with client.stream([log]) as stream:
            async for delta in stream:
                served.tokens += delta.tokens
                served.cached = delta.cached if served.cached is None else served.cached
        with anyio.fail_after(20):
            while keeps and tier is not None and tier.pages * 16 < WHOLE:  # noqa: ASYNC110 - a thread's work
                await anyio.sleep(0.01)
        counters = client.stats().counters
        served.hits, served.stored, served.errors = (
            counters.tier_hits,
            counters.tier_stored,
            counters.tier_errors,
        )
    if tier is not None:
        await anyio.to_thread.run_sync(tier.close)
    return served


def options_of(**changes: object) -> EngineOptions:
    base = EngineOptions(
        model_folder("qwen3"), device="cpu", dtype="float32", max_seqs=4, max_batch_tokens=64, kv_memory=2**22
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # the fields'


async def test_a_restarted_server_finds_a_tenants_prefix_and_no_other_finds_it(
    kept: dict[str, object],
) -> None:
    off = await serve(options_of())
    on = options_of(**kept)
    first, second, other = await serve(on), await serve(on), await serve(on, b"bob")
    assert (first.cached, second.cached, other.cached) == (0, WHOLE, 0)
    assert (first.hits, second.hits, other.hits) == (0, WHOLE, 0)
    assert off.tokens == first.tokens == second.tokens == other.tokens
    changed = await serve(replace(on, dtype="bfloat16"))
    assert changed.cached == 0, "another numerics class"


@pytest.mark.parametrize("kind", ["lmcache", "mooncake"])
async def test_a_restarted_server_finds_its_prefix_in_the_real_store_of_pages(
    kind: str, tmp_path: Path
) -> None:
    with page_store(kind, tmp_path) as store:
        on = options_of(kv_remote=store.url, kv_remote_bytes=2**24)
        first, second, other = await serve(on), await serve(on, keeps=False), await serve(on, b"bob")
    assert (first.cached, second.cached, other.cached) == (0, WHOLE, 0)
    assert first.tokens == second.tokens == other.tokens
    assert first.errors == second.errors == other.errors == 0


async def test_a_request_that_asks_for_memory_only_leaves_nothing_in_a_tier(kept: dict[str, object]) -> None:
    assembly = assemble(options_of(**kept))
    tier = await found(assembly.engine_spec.tier)
    secret = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, salt=b"ann", in_memory=True)
    public = SequenceLog("b", PROMPT[:100], 100, PARAMS, salt=b"ann")
    async with open_in_process(assembly.engine_spec) as client:
        for log in (secret, public):
            async with client.stream([log]) as stream:
                async for _ in stream:
                    pass
        with anyio.fail_after(20):
            while tier.pages < 6:  # noqa: ASYNC110 - a thread's work
                await anyio.sleep(0.01)
        await anyio.sleep(0.3)  # longer than it takes to store what is idle
    assert tier.pages == 6, "those that the other request has, too"
    await anyio.to_thread.run_sync(tier.close)


async def test_a_server_without_a_tier_enters_none_of_its_code(tmp_path: Path) -> None:
    for tiers, on in (
        ({}, False),
        ({"kv_disk": tmp_path, "kv_disk_bytes": 2**24}, True),
        ({"kv_host_bytes": 2**24}, True),
        ({"kv_transfer": True, "page_socket": tmp_path / "0"}, True),
        ({"kv_remote": "memory://calls"}, True),
    ):
        assembly = assemble(options_of(**tiers))
        log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, session="s", session_seconds=60.0)
        with calls_into_tiers() as calls:
            async with open_in_process(assembly.engine_spec) as client:
                for number in range(2):
                    async with client.stream([replace_log(log, id=f"{number}")]) as stream:
                        async for _ in stream:
                            pass
        assert bool(calls) == on, calls
        if assembly.engine_spec.tier is not None:
            await anyio.to_thread.run_sync(assembly.engine_spec.tier.close)


@contextmanager
def calls_into_tiers() -> Iterator[Counter[str]]:
    """The calls of functions that only tiers need, on this thread and on those that begin meanwhile."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        function = f"{os.path.basename(path)} {name}"
        names = path.endswith("page_names.py") and name != "root_key"
        if names or function in TIER_ONLY or f"{os.sep}tiers{os.sep}" in path:
            calls[function] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def test_a_session_that_is_deleted_is_gone_from_memory_and_tiers_over_a_restart(
    kept: dict[str, object],
) -> None:
    options = options_of(**kept)
    chat = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, salt=b"ann", session="chat", session_seconds=600.0)
    cached = []
    for deletes in (False, True, False):
        assembly = assemble(options)
        tier = await found(assembly.engine_spec.tier)
        async with open_in_process(assembly.engine_spec) as client:
            async with client.stream([chat]) as stream:
                cached += [delta.cached async for delta in stream if delta.cached is not None]
            with anyio.fail_after(PATIENCE):
                while tier.pages * 16 < WHOLE:  # noqa: ASYNC110 - a thread's work
                    await anyio.sleep(0.01)
                if deletes:
                    client.forget_session("default", "chat")
                    while tier.pages or client.stats().sessions:  # noqa: ASYNC110 - a thread's work
                        await anyio.sleep(0.01)
        await anyio.to_thread.run_sync(tier.close)
    assert cached == [0, WHOLE, 0]


async def test_a_session_of_a_client_is_kept_and_released() -> None:
    log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, session="s", session_seconds=600.0)
    other = SequenceLog("b", PROMPT[:20], 20, PARAMS)
    kept = []
    async with open_in_process(assemble(options_of()).engine_spec) as client:
        for each, seconds in ((log, None), (other, 0.0), (replace_log(other, id="c"), None)):
            async with client.stream([each]) as stream:
                async for _ in stream:
                    pass
            kept.append((client.stats().sessions, client.stats().pages_kept))
            if seconds is not None:
                client.keep_session("default", "s", seconds)
    assert kept == [(1, WHOLE // 16), (1, WHOLE // 16), (0, 0)]


async def test_what_an_idle_engine_forgets_and_stores_is_reported_without_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, write = threading.Event(), DiskTier._write

    def late(tier: DiskTier, key: PageKey, owner: PageOwner, page: PageBytes) -> None:
        may.wait(PATIENCE)
        write(tier, key, owner, page)

    monkeypatch.setattr(DiskTier, "_write", late)
    assembly = assemble(options_of(kv_disk=tmp_path, kv_disk_bytes=2**24))
    tier = await found(assembly.engine_spec.tier)
    log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, session="s", session_seconds=600.0)
    async with open_in_process(assembly.engine_spec) as client:
        async with client.stream([log]) as stream:
            async for _ in stream:
                pass
        await soon(lambda: tier.pending >= WHOLE // 16, "its pages wait to be written")
        await soon(lambda: not client.stats().in_flight, "it is idle")
        assert (client.stats().counters.tier_stored, client.stats().sessions) == (0, 1)
        may.set()
        await soon(lambda: client.stats().counters.tier_stored == tier.pages > 0, "they are counted")
        client.keep_session("default", "s", 0.0)
        await soon(lambda: not client.stats().sessions, "the session is over")
    await anyio.to_thread.run_sync(tier.close)


async def test_pages_in_int8_survive_too_in_half_the_bytes(tmp_path: Path) -> None:
    wide = options_of(dtype="bfloat16", kv_disk=tmp_path, kv_disk_bytes=2**24)
    narrow = replace(wide, kv_cache_dtype="int8")
    first = await serve(narrow)
    second, other = await serve(narrow), await serve(wide)
    assert (first.cached, second.cached, other.cached) == (0, WHOLE, 0), "each in its own numerics class"
    assert first.tokens == second.tokens
    layouts = [assemble(options).engine_spec.layout for options in (wide, narrow)]
    assert layouts[1].num_pages > 1.7 * layouts[0].num_pages


async def test_a_damaged_page_is_computed(tmp_path: Path) -> None:
    on = options_of(kv_disk=tmp_path, kv_disk_bytes=2**24)
    first = await serve(on)
    _flip_a_bit(tmp_path)
    again = await serve(on, keeps=False)
    assert again.tokens == first.tokens
    assert again.cached is not None
    assert again.cached < WHOLE
    assert again.errors == 1


async def test_a_folder_that_is_a_file_is_one_sentence_and_all_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    served = await serve(options_of(kv_disk=tmp_path / "file", kv_disk_bytes=2**24), keeps=False)
    assert served.tokens == (await serve(options_of())).tokens
    assert served.errors == 1
    assert len([record for record in caplog.records if "--kv-disk" in record.message]) == 1


async def test_a_fetch_that_hangs_delays_a_request_by_its_patience(
    kept: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = options_of(**kept)
    first = await serve(on)
    release = anyio.Event()

    def hang(self: Tier, fetch: object) -> int:
        anyio.from_thread.run(release.wait)
        return 0

    for each in (DiskTier, RemoteTier):
        monkeypatch.setattr(each, "fetch", hang)
    monkeypatch.setattr("personae.engine.scheduling.sequence_table.LONGEST_FETCHES", (0.05, 0.2))
    assembly = assemble(on)
    tier = await found(assembly.engine_spec.tier)
    log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, salt=b"ann")
    tokens: list[int] = []
    async with open_in_process(assembly.engine_spec) as client, client.stream([log]) as stream:
        with anyio.fail_after(20):
            async for delta in stream:
                tokens += delta.tokens
        release.set()
    assert tokens == first.tokens
    tier.close()


def _flip_a_bit(folder: Path) -> None:
    (path,) = folder.rglob("pages-00000.kv")
    data = bytearray(path.read_bytes())
    data[data.index(b"PKVPAGE") + 1024] ^= 1
    path.write_bytes(data)


async def test_a_store_that_hangs_and_then_lies_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    on = options_of(kv_remote=f"file://{tmp_path}", kv_remote_bytes=2**24)
    first = await serve(on)
    release = threading.Event()

    async def hang(self: AsyncObjects, path: str, size: int) -> memoryview | None:
        await asyncio.to_thread(release.wait)
        raise OSError("no route")

    with monkeypatch.context() as patched:
        patched.setattr(AsyncObjects, "get", hang)
        patched.setattr("personae.engine.scheduling.sequence_table.LONGEST_FETCHES", (0.05, 0.2))
        assembly = assemble(on)
        tier = await found(assembly.engine_spec.tier)
        log = SequenceLog("a", PROMPT, len(PROMPT), PARAMS, salt=b"ann")
        tokens: list[int] = []
        async with open_in_process(assembly.engine_spec) as client, client.stream([log]) as stream:
            with anyio.fail_after(PATIENCE):
                async for delta in stream:
                    tokens += delta.tokens
            release.set()
        await anyio.to_thread.run_sync(tier.close)
        assert tokens == first.tokens
    for path in tmp_path.glob("*/*/*/*"):  # noqa: ASYNC240 - a few files of a test
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    lied = await serve(on)
    assert (lied.tokens, lied.hits) == (first.tokens, 0)
    assert lied.errors
    assert (await serve(on)).hits >= 16, "its first page has been stored again"


@pytest.mark.parametrize(("kind", "seconds"), [(DiskTier, 0.0), (HostTier, 0.0), (HostTier, 1000.0)])
async def test_a_preempted_sequence_gets_its_pages_from_a_tier_that_is_faster_than_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[DiskTier | HostTier], seconds: float
) -> None:
    """The prompts fill no page, so what is fetched is what preempted answers had."""
    logs = [
        SequenceLog(f"{n}", (4 + n,) * 8, 8, SamplingParams(max_tokens=150, seed=n, ignore_eos=True))
        for n in range(4)
    ]
    answers: dict[bool, dict[str, list[int]]] = {}
    fetched, fetch, store = [0], kind.fetch, kind.store

    def written(tier: DiskTier | HostTier, *pages: object) -> None:
        store(tier, *pages)  # type: ignore[arg-type]  # as given
        eventually(lambda: not tier._queued, "they are there, however slow the machine is")

    def counted(tier: DiskTier | HostTier, wanted: PageFetch) -> int:
        fetched[0] += (count := fetch(tier, wanted))
        return count

    monkeypatch.setattr(kind, "fetch", counted)
    monkeypatch.setattr(kind, "store", written)
    monkeypatch.setattr(kind, "seconds", lambda tier, pages: seconds)
    on_disk = {"kv_disk": tmp_path, "kv_disk_bytes": 2**26}
    for tiered in (False, True):
        kept = (on_disk if kind is DiskTier else {"kv_host_bytes": 2**26}) if tiered else {}
        assembly = assemble(options_of(kv_memory=2**19, max_model_len=200, **kept))
        tokens = answers[tiered] = {log.id: [] for log in logs}

        async def ask(client: EngineClient, log: SequenceLog, into: list[int]) -> None:
            async with client.stream([log]) as stream:
                async for delta in stream:
                    into += delta.tokens

        async with open_in_process(assembly.engine_spec) as client:
            async with anyio.create_task_group() as tasks:
                for log in logs:
                    tasks.start_soon(ask, client, log, tokens[log.id])
            counters = client.stats().counters
        assert counters.preemptions
        if tiered:
            assert (fetched[0] > 0) == (not seconds)
            assert assembly.engine_spec.tier is not None
            await anyio.to_thread.run_sync(assembly.engine_spec.tier.close)
    assert answers[True] == answers[False]
