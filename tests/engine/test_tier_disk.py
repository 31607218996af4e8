"""The tier on a disk: pages survive the process, and only whole pages of the same kind are used."""

import errno
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tier_pages import ANN, BOB, BOUND, PAGE, content, fetched, keys, store

from personae.engine.plan import PageKey
from personae.engine.scheduling.page_names import session_digest
from personae.engine.tiers import disk, staging
from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.tier import PageBytes


@contextmanager
def opened(
    folder: Path, identity: str = "a model", bound: int = BOUND, page: int = PAGE, parts: int = 1
) -> Iterator[DiskTier]:
    tier = DiskTier(folder, bound, page, identity, parts=parts)
    assert tier.scanned.wait(10)
    try:
        yield tier
    finally:
        tier.close()


def keep(folder: Path, names: list[PageKey], pages: PageBytes, **more: object) -> None:
    with opened(folder, **more) as tier:  # type: ignore[arg-type]  # as given
        store(tier, names, pages)


def test_pages_are_there_after_a_restart(tmp_path: Path) -> None:
    names, pages = keys(20), content(20)
    keep(tmp_path, names, pages)
    with opened(tmp_path) as tier:
        assert tier.pages == 20
        count, found = fetched(tier, names)
        assert count == 20
        assert found is not None
        assert np.array_equal(found, pages)
        assert tier.counts().errors == 0


def test_another_salt_another_model_and_another_size_find_nothing(tmp_path: Path) -> None:
    names = keys(3)
    with opened(tmp_path, parts=2) as tier:
        store(tier, names, content(3))
        with opened(tmp_path, "another model", parts=2) as other:
            assert not other.pages, "and it does not delete what another server has open"
        with opened(tmp_path, page=PAGE + 2, parts=2) as other:
            assert not other.pages
    with opened(tmp_path) as tier:
        assert tier.pages == 3
        assert fetched(tier, keys(3, b"bob")) == (0, None)
    with opened(tmp_path, "another model"):
        pass
    with opened(tmp_path) as tier:
        assert not tier.pages, "pages of a model that nobody serves make room"


def test_a_file_of_another_identity_is_not_used_even_in_the_place_of_the_own(tmp_path: Path) -> None:
    names = keys(3)
    keep(tmp_path / "theirs", names, content(3), identity="theirs")
    keep(tmp_path / "own", names[:1], content(1))
    (theirs,) = (tmp_path / "theirs").rglob("pages-00000.kv")
    (own,) = (tmp_path / "own").rglob("pages-00000.kv")
    own.write_bytes(theirs.read_bytes())
    with opened(tmp_path / "own") as tier:
        assert tier.pages == 0


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_is_noticed_and_never_used(tmp_path: Path, seed: int) -> None:
    names, pages, dice = keys(6), content(6), random.Random(seed)
    keep(tmp_path, names, pages)
    (path,) = tmp_path.rglob("pages-00000.kv")
    data = bytearray(path.read_bytes())
    slot = -(-(512 + 512 + PAGE) // 512) * 512
    match seed % 4:
        case 0:  # a flipped bit
            at = dice.randrange(6 * slot)
            data[at] ^= 1 << dice.randrange(8)
        case 1:  # torn: the end was not written
            del data[dice.randrange(6 * slot) :]
        case 2:  # torn: zeros
            at = dice.randrange(5 * slot)
            data[at : at + slot] = bytes(slot)
        case 3:  # foreign
            data[:] = dice.randbytes(len(data))
    path.write_bytes(data)
    with opened(tmp_path) as tier:
        for name, page in zip(names, pages, strict=True):
            count, found = fetched(tier, [name])
            assert count == 0 or (found is not None and np.array_equal(found[0], page))
        store(tier, names, pages)
    with opened(tmp_path) as tier:
        assert fetched(tier, names)[0] == 6, "what was damaged is written again"


def test_a_page_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    """As if two prompts had the same hash: the tokens are compared."""
    (name,) = keys(1)
    keep(tmp_path, [name], content(1))
    with opened(tmp_path) as tier:
        assert fetched(tier, [name._replace(tokens=b"others")]) == (0, None)


def test_the_bound_holds_and_the_least_recently_used_page_goes_first(tmp_path: Path) -> None:
    slot = 6144
    with opened(tmp_path, bound=10 * slot) as tier:
        first = keys(10)
        for name in first:
            store(tier, [name], content(1))
        _drain(tier)
        assert fetched(tier, first[:5])[0] == 5
        store(tier, keys(4, b"bob"), content(4))
        _drain(tier)
        assert [tier.has(name.name) for name in first] == [True] * 5 + [False] * 4 + [True]
        assert tier.pages == 10
    used = sum(path.stat().st_size for path in tmp_path.rglob("pages-*"))
    assert used <= 10 * slot
    with opened(tmp_path, bound=3 * slot) as tier:
        assert tier.pages <= 3, "a smaller bound than that of the last run"


def test_a_tenant_that_fills_the_disk_overwrites_its_own_pages_only(tmp_path: Path) -> None:
    slot = 6144
    mine, theirs = keys(4, b"ann"), [keys(1, b"bob", 4 * n)[0] for n in range(40)]
    with opened(tmp_path, bound=10 * slot) as tier:
        store(tier, mine, content(4))
        store(tier, theirs[:20], content(20), BOB)
        _drain(tier)
        assert fetched(tier, mine)[0] == 4
        assert tier.pages == 10
    with opened(tmp_path, bound=10 * slot) as tier:  # who owns a page is on the disk, too
        store(tier, theirs[20:], content(20), BOB)
        _drain(tier)
        assert fetched(tier, mine)[0] == 4
        assert [tier.has(name.name) for name in theirs] == [False] * 34 + [True] * 6


def test_a_tenants_share_of_the_disk_is_by_weight(tmp_path: Path) -> None:
    heavy = ANN._replace(weight=4.0)
    with opened(tmp_path, bound=10 * 6144) as tier:
        store(tier, keys(10, b"ann"), content(10), heavy)
        store(tier, keys(10, b"bob"), content(10), BOB)
        _drain(tier)
        assert [sum(tier.has(name.name) for name in keys(10, salt)) for salt in (b"ann", b"bob")] == [8, 2]


def test_two_servers_never_share_a_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as tier, opened(tmp_path) as second:
        store(second, keys(1), content(1))
        assert (second.room, second.pages) == (0, 0)
        assert second.counts().errors == 1
        assert "another server uses" in caplog.text
        assert tier.room > 0
    with opened(tmp_path, parts=2) as tier, opened(tmp_path, parts=2) as second:
        assert tier.room > 0
        assert second.room > 0


def test_a_full_disk_keeps_what_is_there_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 4 * 6144)
    allocate, files = os.posix_fallocate, [0]

    def full(file: int, offset: int, size: int) -> None:
        files[0] += 1
        if files[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING), opened(tmp_path) as tier:
        for name in keys(30):
            store(tier, [name], content(1))
        _drain(tier)
        assert tier.pages == 8, "the newest pages take the places of the oldest"
        assert fetched(tier, keys(30)[-8:])[0] == 8
    assert len(caplog.records) == 1
    assert "is full" in caplog.text


@pytest.mark.parametrize("method", ["mkdir", "open"])
def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def refuse(*args: object, **more: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path if method == "mkdir" else os, method, refuse)
    with opened(tmp_path / "folder") as tier:
        store(tier, keys(1), content(1))
        assert fetched(tier, keys(1)) == (0, None)
        assert tier.counts().errors == 1
    assert len(caplog.records) == 1


def test_writes_that_fail_stop_for_a_while_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as tier:
        store(tier, keys(2), content(2))
        _drain(tier)

        def fail(*args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwritev", fail)
        store(tier, keys(2, b"bob"), content(2))
        _drain(tier)
        assert tier.room == 0
        assert fetched(tier, keys(2))[0] == 2
        tier._silent_until = 0.0
        monkeypatch.undo()
        store(tier, keys(2, b"bob"), content(2))
        _drain(tier)
        assert fetched(tier, keys(2, b"bob"))[0] == 2
    assert len(caplog.records) == 1


def test_a_read_that_does_not_end_stops_further_fetches(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.seconds(1) is not None
        tier._overdue[99] = 0.0
        assert tier.seconds(1) is None
        del tier._overdue[99]
        huge = staging.STAGED_BYTES // PAGE
        ticket = tier.reserve(huge)
        assert tier.seconds(1) is None, "what is staged is bounded"
        tier.discard(ticket)
        assert tier.seconds(1) is not None


def test_the_pages_of_a_session_are_deleted_and_zeros_stay(tmp_path: Path) -> None:
    own, shared, others = keys(3), keys(1, first=100), keys(3, b"bob")
    chat = ANN._replace(session=session_digest("chat"))
    pages = content(7)
    with opened(tmp_path) as tier:
        store(tier, own[:2], pages[:2], chat)
        store(tier, shared, pages[2:3])
        store(tier, others, pages[3:6], BOB._replace(session=chat.session))
    with opened(tmp_path) as tier:  # which session a page is of is on the disk, too
        store(tier, own[2:], pages[6:], chat)
        tier.forget(ANN.tenant, chat.session)
        tier.forget(ANN.tenant, session_digest("another"))
        tier.close()
        assert tier.pages == 4
        assert not any(tier.has(name.name) for name in own)
        assert tier.counts().errors == 0
    (path,) = tmp_path.rglob("pages-00000.kv")
    data = path.read_bytes()
    assert not any(page.tobytes() in data for page in (pages[0], pages[1], pages[6]))
    with opened(tmp_path) as tier:
        assert tier.pages == 4
        assert fetched(tier, shared)[0] == 1
        assert fetched(tier, others)[0] == 3, "a session of that name of another tenant"
        store(tier, own, content(3), chat)
        _drain(tier)
        assert tier.pages == 7
        assert sum(each.stat().st_size for each in tmp_path.rglob("pages-*")) == len(data)


def test_pages_of_a_session_that_cannot_be_overwritten_are_used_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ANN._replace(session=session_digest("chat"))
    with opened(tmp_path) as tier:
        store(tier, keys(2), content(2), chat)

        def fail(*args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwrite", fail)
        tier.forget(chat.tenant, chat.session)
        store(tier, keys(1, b"bob"), content(1), BOB)
        _drain(tier)
        assert fetched(tier, keys(2))[0] == 0
        assert fetched(tier, keys(1, b"bob"))[0] == 1
    assert "of a deleted session stay" in caplog.text


def _drain(tier: DiskTier) -> None:
    """Wait until the writer has written everything."""
    for _ in range(1000):
        if not tier._queued:
            return
        disk.time.sleep(0.005)
    raise AssertionError("the writer does not come to an end")
