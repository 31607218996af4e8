"""The tier in host memory: what a GPU has no room for, within bounds, for its owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import eventually
from tier_pages import BOB, CHAT, PAGE, content, fetched, keys, store

from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.host_memory import HostTier
from personae.engine.tiers.stack import TierStack
from personae.engine.worker.runner import _on_host
from personae.kernels.side_stream import SideStream

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to pin for")),
]


@contextmanager
def opened(pages: int, device: str = "cpu") -> Iterator[HostTier]:
    tier = HostTier(pages * PAGE, PAGE, torch.device(device))
    try:
        yield tier
    finally:
        tier.close()
        assert not tier._writer.is_alive()


def drain(tier: HostTier) -> None:
    eventually(lambda: not tier._queued and tier._queue.empty(), "all is stored")


@pytest.mark.parametrize("device", DEVICES)
def test_pages_come_back_as_they_were_and_only_whole_ones_of_the_same_tokens(device: str) -> None:
    names, pages = keys(20), content(20)
    with opened(30, device) as tier:
        store(tier, names, pages)
        drain(tier)
        count, found = fetched(tier, names)
        assert count == 20
        assert found is not None
        assert np.array_equal(found, pages)
        assert torch.from_numpy(found).is_pinned() == (device == "cuda")
        assert fetched(tier, keys(3, b"bob")) == (0, None)
        assert fetched(tier, [names[0], names[1]._replace(tokens=b"others")])[0] == 1
        assert tier.counts() == (20, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_are_copied_beside_the_steps_as_they_are_when_they_are_given(device: str) -> None:
    beside = SideStream() if device == "cuda" else None
    pages = torch.from_numpy(content(9)).to(device)
    given = pages.clone()
    ready = _on_host(given, beside)
    pages.zero_()
    del given
    assert np.array_equal(ready(), content(9))


def test_the_bound_holds_and_a_tenant_that_fills_it_loses_its_own_pages_only() -> None:
    mine = keys(4)
    with opened(10) as tier:
        store(tier, mine, content(4))
        for number in range(40):
            store(tier, keys(1, b"bob", 4 * number), content(1), BOB)
        drain(tier)
        assert tier.pages == 10
        assert fetched(tier, mine)[0] == 4
        assert [tier.has(keys(1, b"bob", 4 * number)[0].name) for number in range(33, 40)] == [
            *[False],
            *[True] * 6,
        ]


def test_a_deleted_session_is_overwritten_and_its_places_are_used_again() -> None:
    with opened(6) as tier:
        store(tier, keys(4), content(4), CHAT)
        tier.forget(CHAT.tenant, CHAT.session)
        drain(tier)
        eventually(lambda: not tier.pages, "they are gone")
        assert not tier._slots.any()
        store(tier, keys(6, b"bob"), content(6), BOB)
        drain(tier)
        assert fetched(tier, keys(6, b"bob"))[0] == 6


def test_memory_is_asked_before_the_disk_which_has_what_memory_lost(tmp_path: Path) -> None:
    names, pages = keys(9), content(9)
    with opened(4) as near:
        far = DiskTier(tmp_path, 2**20, PAGE, "a model")
        both = TierStack([near, far], PAGE)
        for name, page in zip(reversed(names), pages[::-1], strict=True):
            store(both, [name], page[None])
        eventually(lambda: (near.pages, far.pages) == (4, 9), "each has what it has room for")
        assert both.wants(names[8].name), "the memory has lost it"
        count, found = fetched(both, names)
        assert count == 9
        assert found is not None
        assert np.array_equal(found, pages)
        far.close()


def test_a_bound_below_a_page_is_one_sentence_and_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tier = HostTier(PAGE - 1, PAGE, torch.device("cpu"))
    store(tier, keys(1), content(1))
    assert (tier.room, tier.pages) == (0, 0)
    assert not tier.has(keys(1)[0].name)
    assert "--kv-host-bytes is too small" in caplog.text
    tier.close()
