"""A KV cache in a file that another process holds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from personae.engine.kv import KVCache, Specs
from personae.engine.layers.block import KVSpec
from personae.engine.page_file import PageFile, open_page_file
from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.prefix import TenantPages, TrieRoot
from personae.kernels.memory_file import nameless_file

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
LAYOUT = MemoryLayout(num_pages=64, page_size=16, max_seqs=2, max_model_len=64, max_batch_tokens=16)
SPECS = [KVSpec(2, 24)] * 3
ROOT = TrieRoot(("base", b"salt"), TenantPages("ann"))


@pytest.fixture
def held() -> Iterator[int]:
    file = nameless_file()
    yield file
    os.close(file)


def path_of(held: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{held}")


def opened(held: int, specs: Specs = SPECS, identity: str = "it", layout: MemoryLayout = LAYOUT) -> PageFile:
    size = layout.num_pages * KVCache.bytes_per_page(specs, layout.page_size, torch.bfloat16)
    return PageFile(path_of(held), identity, layout, size, 2 * len(specs))


def cache_in(file: PageFile, specs: Specs = SPECS, layout: MemoryLayout = LAYOUT) -> KVCache:
    return KVCache(specs, layout, torch.bfloat16, torch.device("cpu"), memory=file.memory())


@pytest.mark.parametrize(
    "specs",
    [
        SPECS,
        [KVSpec(1, 80, latent=64)] * 2,
        [
            KVSpec(2, 24),
            KVSpec(1, 48, latent=0),
            None,
            KVSpec(1, 40, latent=0, state=(2, 8, 8)),
            KVSpec(2, 24),
        ],
        [KVSpec(2, 24, torch.int8)] * 2,
    ],
    ids=["keys and values", "latent", "convolutions and states", "int8"],
)
def test_an_engine_finds_the_content_of_the_pages_and_what_they_hold(held: int, specs: Specs) -> None:
    file = opened(held, specs)
    kv = cache_in(file, specs)
    for number, tensor in enumerate(kv._tensors()):
        tensor.copy_((torch.arange(tensor.numel()) % 113 + number).view(tensor.shape))
    content = kv.read_pages(range(64))
    file.ledger.note(5, ROOT, (1, 2, 3), 0, 3)
    again = opened(held, specs)
    assert torch.equal(cache_in(again, specs).read_pages(range(64)), content)
    assert [again.ledger.chunk(page) for page in again.ledger.held()] == [(1, 2, 3)]


@pytest.mark.parametrize(
    "other",
    [
        {"identity": "another"},
        {"layout": MemoryLayout(65, 16, 2, 64, 16)},
        {"layout": MemoryLayout(128, 8, 2, 64, 16)},
        {"specs": [KVSpec(4, 24)] * 3},
    ],
    ids=["identity", "pages", "page size", "specs"],
)
def test_another_engine_begins_with_an_empty_cache(held: int, other) -> None:
    file = opened(held)
    cache_in(file).data.fill_(7)
    file.ledger.note(5, ROOT, (1, 2, 3), 0, 3)
    again = opened(held, **other)
    assert not again.ledger.held()
    other.pop("identity", None)
    assert not cache_in(again, **other).read_pages([0, 5, 63]).any()


def test_an_emptied_file_begins_empty(held: int) -> None:
    file = opened(held)
    file.ledger.note(5, ROOT, (1, 2, 3), 0, 3)
    del file
    os.ftruncate(held, 0)
    assert not opened(held).ledger.held()


def test_memory_of_the_file_is_taken_when_it_is_written_and_given_back_when_it_is_unmapped(held: int) -> None:
    layout = MemoryLayout(4096, 16, 2, 64, 16)
    kv = cache_in(opened(held, layout=layout), layout=layout)
    empty = os.fstat(held).st_blocks
    kv.data.fill_(1)
    full = os.fstat(held).st_blocks
    assert (full - empty) * 512 >= 0.99 * kv.data.nbytes
    for _ in kv.unmapping(range(2048, 4096)):
        pass
    assert os.fstat(held).st_blocks <= full - 0.4 * (full - empty)
    assert not kv.read_pages([3000]).any()
    assert kv.data[:, :, :2048].eq(1).all()


def test_pages_that_are_used_come_onto_huge_pages_with_their_content(held: int) -> None:
    layout = MemoryLayout(4096, 16, 2, 64, 16)
    kv = cache_in(opened(held, layout=layout), layout=layout)
    kv.data[:, :, 7] = 3
    kv.reach(7)
    kv.data[:, :, 2000] = 4
    used = os.fstat(held).st_blocks
    kv.reach(2000)
    assert kv.data[:, :, 7].eq(3).all()
    assert kv.data[:, :, 2000].eq(4).all()
    assert not kv.data[:, :, 8:2000].any()
    kv.reach(2000)
    lines = (
        Path("/proc/self/smaps")
        .read_text(encoding="utf-8")
        .split(f"\n{kv.data.data_ptr():x}-")[1]
        .splitlines()
    )
    huge = next(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:"))
    if not huge:
        pytest.skip("this system does not put files on huge pages")
    assert huge >= 6 * 2048
    assert os.fstat(held).st_blocks > used


def test_a_file_that_cannot_be_opened_is_done_without(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert open_page_file(tmp_path / "gone", "it", LAYOUT, 2**20, 2) is None
    assert "the KV cache ends with this engine" in caplog.text
