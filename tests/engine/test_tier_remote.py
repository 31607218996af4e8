"""The tier in an object store: pages survive the process and are shared, only whole pages of the same kind
are used, and a store that hangs, fails or lies costs nothing but computing."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from patience import eventually
from s3 import s3_server
from tier_pages import ANN, BOB, BOUND, CHAT, PAGE, content, fetched, keys, store

from personae.engine.object_stores import AsyncObjects, StoredObject, open_store
from personae.engine.plan import PageKey
from personae.engine.tiers import remote
from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.remote import RemoteTier
from personae.engine.tiers.stack import TierStack
from personae.engine.tiers.tier import PageBytes, PageFetch

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")

_number = count()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{next(_number)}" if request.param == "memory" else f"file://{tmp_path}/bucket"


class Faulty(AsyncObjects):
    """A store that does as it is told."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.trouble: Exception | str | None = None
        self.asked: list[str] = []
        self.most = self._now = 0

    async def _suffer(self, what: str) -> None:
        self.asked.append(what)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if self.trouble == "hang":
                await asyncio.Event().wait()
            elif isinstance(self.trouble, Exception):
                raise self.trouble
            await asyncio.sleep(0)
        finally:
            self._now -= 1

    async def put(self, path: str, data: bytes) -> None:
        await self._suffer("put")
        await super().put(path, data)

    async def get(self, path: str, size: int) -> memoryview | None:
        await self._suffer("get")
        return await super().get(path, size)

    async def list(self, prefix: str) -> AsyncGenerator[Sequence[StoredObject], None]:
        await self._suffer("list")
        async for some in super().list(prefix):
            yield some

    async def delete(self, paths: Sequence[str]) -> None:
        await self._suffer("delete")
        await super().delete(paths)


@contextmanager
def opened(url: str, identity: str = "a model", bound: int = BOUND, page: int = PAGE) -> Iterator[RemoteTier]:
    tier = RemoteTier(Faulty(url), bound, page, identity)
    eventually(tier.listed.is_set, "the first listing")
    try:
        yield tier
    finally:
        tier.close()
        assert not tier._thread.is_alive()


def faults(tier: RemoteTier) -> Faulty:
    assert isinstance(tier._objects, Faulty)
    return tier._objects


def drain(tier: RemoteTier) -> None:
    eventually(lambda: not tier._queued, "all is stored")


def keep(url: str, names: list[PageKey], pages: PageBytes, identity: str = "a model") -> None:
    with opened(url, identity) as tier:
        store(tier, names, pages)


def paths(url: str) -> list[str]:
    found = obstore.list(open_store(url, 0)).collect()
    return sorted(each["path"] for each in found)


def test_pages_are_there_after_a_restart_and_for_other_servers(url: str) -> None:
    names, pages = keys(40), content(40)
    keep(url, names, pages)
    with opened(url) as tier, opened(url) as other:
        for each in (tier, other):
            assert each.pages == 40
            count, found = fetched(each, names)
            assert count == 40
            assert found is not None
            assert np.array_equal(found, pages)
            assert each.counts() == (0, 0)


def test_what_another_server_stored_or_deleted_is_found_by_the_next_listing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LIST_SECONDS", 0.05)
    with opened(url) as tier, opened(url) as other:
        store(tier, keys(3), content(3), CHAT)
        eventually(lambda: other.pages == 3, "the other finds them")
        assert fetched(other, keys(3))[0] == 3
        other.forget(CHAT.tenant, CHAT.session)
        eventually(lambda: not tier.pages, "they are gone for the first, too")
        assert tier.counts().errors == other.counts().errors == 0


def test_another_salt_another_model_and_another_size_find_nothing(url: str) -> None:
    keep(url, keys(3), content(3))
    for identity, page in (("another model", PAGE), ("a model", PAGE + 2)):
        with opened(url, identity, page=page) as tier:
            assert not tier.pages
    with opened(url) as tier:
        assert tier.pages == 3, "others have deleted nothing"
        assert fetched(tier, keys(3, b"bob")) == (0, None)
        assert fetched(tier, [keys(1)[0]._replace(tokens=b"others")]) == (0, None), "tokens are compared"


@pytest.mark.parametrize("damage", ["flipped", "torn", "longer", "another page", "another model", "gone"])
@pytest.mark.parametrize("seed", range(3))
def test_a_page_that_is_not_what_its_path_says_is_never_used(url: str, damage: str, seed: int) -> None:
    names, pages = keys(4), content(4)
    keep(url, names, pages)
    place, api = open_store(url, 0), obstore
    path = next(each for each in paths(url) if names[2].name.hex() in each)
    data = bytearray(bytes(api.get(place, path).bytes()))
    match damage:
        case "flipped":
            at = int(np.random.default_rng(seed).integers(len(data)))
            data[at] ^= 1 << seed
        case "torn":
            del data[len(data) - 1 - seed * 2000 :]
        case "longer":
            data += bytes(1 + seed)
        case "another page":
            other = next(each for each in paths(url) if names[seed % 2].name.hex() in each)
            data = bytearray(bytes(api.get(place, other).bytes()))
        case "another model":
            keep(f"{url}{seed}theirs", names, pages, "their model")
            there = f"{url}{seed}theirs"
            other = next(each for each in paths(there) if names[2].name.hex() in each)
            data = bytearray(bytes(api.get(open_store(there, 0), other).bytes()))
    with opened(url) as tier:
        api.delete(place, path)
        if damage != "gone":
            api.put(place, path, bytes(data))
        count, found = fetched(tier, names)
        assert count == 2
        assert found is not None
        assert np.array_equal(found, pages[:count])
        assert tier.counts().errors == (damage != "gone")
        assert not tier.has(names[2].name)
        store(tier, names[2:3], pages[2:3])
        drain(tier)
        assert fetched(tier, names)[0] == 4, "what was damaged is stored again"


def test_foreign_objects_in_the_folder_are_left_alone(url: str) -> None:
    keep(url, keys(1), content(1))
    root = paths(url)[0].split("/")[0]
    for name in ("notes.txt", f"{root}/readme", f"{root}/aa/bb/cc", f"{root}/{'0' * 32}/{'0' * 32}/zz"):
        obstore.put(open_store(url, 0), name, b"x" * 2 * PAGE)
    with opened(url) as tier:
        assert tier.pages == 1
        assert fetched(tier, keys(1))[0] == 1
        assert tier.counts().errors == 0
    assert len(paths(url)) == 5


def test_the_bound_holds_and_a_tenant_that_fills_it_deletes_its_own_pages_only(url: str) -> None:
    mine, theirs = keys(4), [keys(1, b"bob", 4 * n)[0] for n in range(40)]
    with opened(url, bound=10 * PAGE) as tier:
        store(tier, mine, content(4))
        store(tier, theirs[:20], content(20), BOB)
        drain(tier)
        assert tier.pages == len(paths(url)) == 10
        assert fetched(tier, mine)[0] == 4
    with opened(url, bound=10 * PAGE) as tier:  # whose a page is says its path
        store(tier, theirs[20:], content(20), BOB)
        drain(tier)
        assert fetched(tier, mine)[0] == 4
        assert tier.pages == len(paths(url)) == 10
    with opened(url, bound=3 * PAGE) as tier:
        store(tier, theirs[:1], content(1), BOB)
        drain(tier)
        assert tier.pages == len(paths(url)) == 3, "a smaller bound than that of the last run"


def test_the_least_recently_used_page_goes_first(url: str) -> None:
    names = keys(10)
    with opened(url, bound=10 * PAGE) as tier:
        for name in names:
            store(tier, [name], content(1))
            drain(tier)
        assert fetched(tier, names[:5])[0] == 5
        for name in keys(3, b"bob"):
            store(tier, [name], content(1))
            drain(tier)
        assert [tier.has(name.name) for name in names] == [True] * 5 + [False] * 3 + [True] * 2


def test_the_pages_of_a_deleted_session_are_deleted_for_all_servers(url: str) -> None:
    own, others = keys(3), keys(3, b"bob")
    with opened(url) as tier:
        store(tier, own[:2], content(2), CHAT)
        store(tier, keys(1, first=100), content(1))
        store(tier, others, content(3), BOB._replace(session=CHAT.session))
    with opened(url) as tier, opened(url) as another:
        store(another, own[2:], content(1), CHAT)
        drain(another)
        assert not tier.has(own[2].name), "it was stored after the listing"
        tier.forget(CHAT.tenant, CHAT.session)
        assert not any(tier.has(name.name) for name in own), "at once"
        eventually(lambda: not tier._to_forget, "they are deleted")
        assert len(paths(url)) == 4
        assert fetched(another, own) == (0, None)
        assert (tier.counts().errors, another.counts().errors) == (0, 0)
        assert fetched(tier, others)[0] == 3, "a session of that name of another tenant"
        store(tier, own, content(3), CHAT)
        drain(tier)
        assert fetched(tier, own)[0] == 3


def test_a_session_is_deleted_after_pages_of_it_that_are_being_stored(url: str) -> None:
    with opened(url) as tier:
        for name in keys(20):
            store(tier, [name], content(1), CHAT)
        tier.forget(CHAT.tenant, CHAT.session)
        store(tier, keys(2, b"bob"), content(2), BOB)
    assert len(paths(url)) == 2


@pytest.mark.parametrize("trouble", ["hang", OSError("no route"), ValueError("nonsense"), RuntimeError("x")])
def test_a_store_that_hangs_or_fails_is_left_alone_for_a_while(
    url: str, trouble: Exception | str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 1000.0)
    with caplog.at_level(logging.WARNING), opened(url) as tier:
        store(tier, keys(4), content(4))
        drain(tier)
        faults(tier).trouble = trouble
        assert fetched(tier, keys(4)) == (0, None)
        assert tier.room == 0
        assert not any(tier.has(name.name) for name in keys(4)), "so they are computed"
        asked = len(faults(tier).asked)
        store(tier, keys(9, b"bob"), content(9), BOB)
        drain(tier)
        assert fetched(tier, keys(4)) == (0, None)
        tier.forget(CHAT.tenant, CHAT.session)
        assert len(faults(tier).asked) == asked, "nothing is asked meanwhile"
        faults(tier).trouble = None
        tier._silent_until = 0.0
        assert fetched(tier, keys(4))[0] == 4
    assert tier.counts().errors >= 1
    assert len([each for each in caplog.records if "cannot be fetched" in each.message]) == 1


def test_the_pause_grows_with_each_failure_and_ends_with_a_success(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url) as tier:
        store(tier, keys(1), content(1))
        drain(tier)
        faults(tier).trouble = OSError("no route")
        pauses = []
        for _ in range(8):
            begun = remote.time.monotonic()
            fetched(tier, keys(1))
            pauses.append(round(tier._silent_until - begun))
            tier._silent_until = 0.0
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        faults(tier).trouble = None
        assert fetched(tier, keys(1))[0] == 1
        faults(tier).trouble = OSError("no route")
        begun = remote.time.monotonic()
        fetched(tier, keys(1))
        assert round(tier._silent_until - begun) == 1


def test_a_store_that_does_not_answer_at_the_start_is_tried_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(url, keys(3), content(3))
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.02)
    objects = Faulty(url)
    objects.trouble = OSError("no route")
    tier = RemoteTier(objects, BOUND, PAGE, "a model")
    eventually(tier.listed.is_set, "the first listing has failed")
    assert tier.pages == 0
    tier.forget(ANN.tenant, CHAT.session)
    objects.trouble = None
    eventually(lambda: tier.pages == 3, "it is listed when the store answers")
    eventually(lambda: not tier._to_forget, "and what was to be deleted is deleted")
    tier.close()


def test_a_session_that_cannot_be_deleted_is_used_no_more_and_deleted_later(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "LIST_SECONDS", 0.02)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.02)
    with opened(url) as tier:
        store(tier, keys(2), content(2), CHAT)
        drain(tier)
        faults(tier).trouble = OSError("no route")
        tier.forget(CHAT.tenant, CHAT.session)
        asked = faults(tier).asked
        eventually(lambda: asked.count("list") > 5, "it is tried again")
        assert fetched(tier, keys(2)) == (0, None)
        assert len(paths(url)) == 2
        faults(tier).trouble = None
        eventually(lambda: not paths(url), "they are deleted")
    assert "of a deleted session stay" in caplog.text


def test_a_store_that_cannot_list_is_asked_for_one_page_before_it_is_asked_for_others(url: str) -> None:
    names, pages = keys(20), content(20)
    objects = Faulty(url)
    objects.lists = False
    keep(url, keys(3, b"bob"), content(3))
    tiers = [RemoteTier(objects, BOUND, PAGE, "a model") for _ in range(2)]
    for tier in tiers:
        eventually(tier.listed.is_set, "it has asked for a listing")
        assert not tier.pages, "and takes nothing from it"
    store(tiers[0], names, pages, CHAT)
    drain(tiers[0])
    assert tiers[1].has(names[0].name), "it may have any page"
    assert tiers[1].wants(names[0].name)
    assert not tiers[0].wants(names[0].name)
    count, found = fetched(tiers[1], names)
    assert count == 20
    assert found is not None
    assert np.array_equal(found, pages)
    objects.asked.clear()
    assert fetched(tiers[1], keys(20, b"carol")) == (0, None)
    assert objects.asked == ["get"]
    for tier in tiers:
        tier.close()
        assert tier.counts().errors == 0


def test_stores_and_fetches_at_once_are_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "IN_FLIGHT_BYTES", 3 * PAGE)
    monkeypatch.setattr(remote, "QUEUE_BYTES", 50 * PAGE)
    with opened(url) as tier:
        assert tier.room == 50
        faults(tier).most = 0
        store(tier, keys(40), content(40))
        assert tier.room <= 50
        drain(tier)
        assert fetched(tier, keys(40))[0] == 40
        assert faults(tier).most == 3


def test_a_fetch_that_nobody_waits_for_any_more_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_REQUESTS", 1)
    with opened(url) as tier:
        store(tier, keys(40), content(40))
        drain(tier)
        ticket = tier.reserve(40)
        faults(tier).asked.clear()
        get = faults(tier).get

        async def discard(path: str, size: int) -> memoryview | None:
            tier.discard(ticket)
            return await get(path, size)

        monkeypatch.setattr(faults(tier), "get", discard)
        assert tier.fetch(PageFetch(ticket, (), tuple(keys(40)))) == 1
        assert faults(tier).asked.count("get") == 1
        assert not tier._staged


def test_a_tier_that_is_closed_while_its_store_hangs_leaves_no_thread(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CLOSE_SECONDS", 0.1)
    with opened(url) as tier:
        faults(tier).trouble = "hang"
        store(tier, keys(3), content(3))
        eventually(lambda: "put" in faults(tier).asked, "it hangs")
    store(tier, keys(3), content(3))
    tier.forget(ANN.tenant, CHAT.session)
    assert fetched(tier, keys(3)) == (0, None)
    assert tier.room == 0


def test_a_disk_and_a_remote_tier_complete_each_other(url: str, tmp_path: Path) -> None:
    names, pages = keys(9), content(9)
    with opened(url) as far:
        near = DiskTier(tmp_path / "disk", BOUND, PAGE, "a model")
        assert near.scanned.wait(10)
        both = TierStack([near, far], PAGE)
        store(near, names[:4], pages[:4])
        store(far, names[3:], pages[3:])
        drain(far)
        eventually(lambda: near.pages == 4, "the disk has them")
        count, found = fetched(both, names)
        assert count == 9
        assert found is not None
        assert np.array_equal(found, pages)
        assert not near._tickets
        assert not far._tickets
        store(both, keys(2, b"bob"), content(2), CHAT)
        drain(far)
        eventually(lambda: near.pages == 6, "each has all that is stored")
        assert far.pages == 8
        both.forget(CHAT.tenant, CHAT.session)
        eventually(lambda: (near.pages, far.pages) == (4, 6), "and forgets it")
        eventually(lambda: not far._to_forget, "its objects are deleted")
        far._silent_until = remote.time.monotonic() + 1000
        store(both, keys(2, b"bob"), content(2), BOB)
        eventually(lambda: near.pages == 6, "a tier that fails does not hold up the other")
        assert far.pages == 6
        assert fetched(both, names)[0] == 4
        assert both.counts().stored == 16
        near.close()


def test_a_real_s3_keeps_pages_and_may_fail_and_come_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = "s3://personae/some/prefix"
        names, pages = keys(20), content(20)
        keep(url, names, pages)
        assert all(path.startswith("some/prefix/") for path in server.list())
        with caplog.at_level(logging.DEBUG), opened(url) as tier:
            count, found = fetched(tier, names)
            assert count == 20
            assert found is not None
            assert np.array_equal(found, pages)
            server.fail(503)
            assert fetched(tier, names) == (0, None)
            server.heal()
            tier._silent_until = 0.0
            assert fetched(tier, names)[0] == 20
            store(tier, keys(3, b"bob"), content(3), CHAT)
            drain(tier)
            tier.forget(CHAT.tenant, CHAT.session)
            eventually(lambda: len(server.list()) == 20, "the session is deleted")
            server.revoke()
            assert fetched(tier, names) == (0, None)
        assert server.secret not in caplog.text
