"""The real LMCache and the real Mooncake Store as --kv-remote, on loopback."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from page_stores import PageStore, page_store
from patience import eventually
from tier_pages import ANN, BOUND, CHAT, PAGE, content, fetched, keys, store

from personae.engine.object_stores import LMCACHE
from personae.engine.tiers import remote
from personae.engine.tiers.page_header import header_bytes
from personae.engine.tiers.remote import Objects, RemoteTier


@pytest.fixture(scope="module", params=["lmcache", "mooncake"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageStore]:
    with page_store(request.param, tmp_path_factory.mktemp(request.param)) as store:
        yield store


def objects_at(url: str) -> Objects:
    if url.startswith(LMCACHE):
        from personae.engine.tiers.lmcache import LMCacheObjects

        return LMCacheObjects(url, header_bytes(128) + PAGE)
    from personae.engine.tiers.mooncake import MooncakeObjects

    return MooncakeObjects(url)


@contextmanager
def opened(running: PageStore, identity: str) -> Iterator[RemoteTier]:
    tier = RemoteTier(objects_at(running.url), BOUND, PAGE, identity)
    eventually(tier.listed.is_set, "the first listing")
    try:
        yield tier
    finally:
        tier.close()


def drain(tier: RemoteTier) -> None:
    eventually(lambda: not tier._queued, "all is stored")


def test_pages_are_found_by_other_servers_with_the_same_model(running: PageStore) -> None:
    names, pages = keys(40), content(40)
    with opened(running, "a model") as tier:
        store(tier, names[:30], pages[:30], CHAT)
        store(tier, names[30:], pages[30:])
        drain(tier)
        assert tier.counts() == (40, 0)
        with opened(running, "a model") as other, opened(running, "another model") as foreign:
            count, found = fetched(other, names)
            assert count == 40
            assert found is not None
            assert np.array_equal(found, pages)
            assert fetched(other, keys(3, b"bob")) == (0, None)
            assert fetched(foreign, names) == (0, None)
            assert other.counts().errors == foreign.counts().errors == 0
            assert fetched(other, [names[0]._replace(tokens=b"others")]) == (0, None), "tokens are compared"
            assert other.counts().errors == 1


def test_pages_of_a_deleted_session_are_deleted_where_the_store_can(
    running: PageStore, caplog: pytest.LogCaptureFixture
) -> None:
    names = keys(9)
    with opened(running, "sessions") as tier:
        store(tier, names[:3], content(3))
        store(tier, names[3:], content(6), CHAT)
    with opened(running, "sessions") as tier:
        tier.forget(CHAT.tenant, CHAT.session)
        eventually(lambda: not tier._to_forget, "they are deleted")
        assert tier.wants(names[3].name)
        kept = running.url.startswith(LMCACHE)
        assert fetched(tier, names)[0] == (9 if kept else 3)
        assert ("cannot delete the pages of sessions" in caplog.text) == kept


def test_a_store_that_stands_still_or_dies_costs_computing_only(
    running: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, pages = keys(6), content(6)
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(remote, "LIST_SECONDS", 0.5)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.2)
    with opened(running, "faults") as tier:
        store(tier, names[:3], pages[:3])
        drain(tier)
        assert fetched(tier, names[:3])[0] == 3
        for number in (signal.SIGSTOP, signal.SIGKILL):
            begun = time.monotonic()
            if number == signal.SIGSTOP:
                running.send(number)
            else:
                running.kill()
            assert fetched(tier, names[:3]) == (0, None)
            store(tier, names[3:], pages[3:])
            drain(tier)
            assert time.monotonic() - begun < 20, "nobody waits for it"
            assert tier.counts().errors
            if number == signal.SIGSTOP:
                running.send(signal.SIGCONT)
            else:
                running.start()
            eventually(lambda: _stores(tier), "it is used again")
    assert "it does not answer" in caplog.text


def _stores(tier: RemoteTier) -> bool:
    """Whether a new page is stored and found."""
    name = keys(1, first=4 * int(time.monotonic() * 1000))
    store(tier, name, content(1), ANN)
    drain(tier)
    return fetched(tier, name)[0] == 1
