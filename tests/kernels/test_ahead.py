"""Pages that come next have memory before anyone writes them, and no more of them than was asked for."""

import ctypes
import mmap
import sys
import threading
import time

import pytest
import torch

from personae.kernels.ahead import Ahead
from personae.kernels.malloc import libc
from personae.kernels.mappable import HUGE
from personae.kernels.memory import TorchMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing happens")
CPU = torch.device("cpu")
SIZE = 2**16  # bytes of a page
PLACES = 3


def cache(pages: int = 4096) -> list[torch.Tensor]:
    return [*TorchMemory(CPU).reserve((PLACES, pages, SIZE), torch.uint8)]


def on_small_pages() -> list[torch.Tensor]:
    memory = mmap.mmap(-1, 2**26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return [torch.frombuffer(memory, dtype=torch.uint8).view(-1, SIZE)]


def settled() -> None:
    """Wait until no thread asks for memory."""
    deadline = time.monotonic() + 60
    while any(thread.name == "pages-ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def present(part: torch.Tensor) -> float:
    """The share of a part's memory that is there."""
    first = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(part.data_ptr() + part.nbytes - first) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    assert not libc().mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), found)
    return sum(each & 1 for each in found) / count


def asked(tensors: list[torch.Tensor], pages: int = 1000) -> Ahead:
    ahead = Ahead(tensors, pages)
    ahead.reach(0)
    settled()
    if not present(tensors[0][:1]):
        pytest.skip("before Linux 6.4, or without compiled operators, nothing happens")
    return ahead


def test_the_next_pages_have_memory_in_each_place_before_they_are_written() -> None:
    tensors = cache()
    ahead = asked(tensors)
    most = HUGE // SIZE  # pages that a huge page holds
    for tensor in tensors:
        assert present(tensor[: most + 1]) == 1
        assert not present(tensor[3 * most : 4000]), "one huge page ahead, which may lie on two"
        assert not tensor[: most + 1].any()
    ahead.reach(500)
    settled()
    for tensor in tensors:
        assert present(tensor[: 500 + most + 1]) == 1
        assert not present(tensor[500 + 3 * most : 4000])


def test_no_more_pages_have_memory_than_were_asked_for() -> None:
    tensors = on_small_pages()
    ahead = asked(tensors, 8)
    assert present(tensors[0][:9]) == 1
    assert not present(tensors[0][9:])
    ahead.reach(4)
    settled()
    assert not present(tensors[0][9:]), "half of them are left"
    ahead.reach(5)
    settled()
    assert present(tensors[0][:14]) == 1
    assert not present(tensors[0][14:])


def test_what_pages_hold_stays() -> None:
    tensors = cache()
    for tensor in tensors:
        tensor[5] = 7
    ahead = asked(tensors)
    ahead.reach(100)
    settled()
    for tensor in tensors:
        assert tensor[5].eq(7).all()
        assert not tensor[:5].any()
        assert not tensor[6:120].any()


def test_pages_that_are_lent_get_no_memory_before_they_are_back() -> None:
    tensors = on_small_pages()
    ahead = asked(tensors, 8)
    ahead.unmap([12, 13, 14, 15])
    ahead.reach(8)
    settled()
    assert present(tensors[0][:12]) == 1
    assert not present(tensors[0][12:])
    ahead.map([12, 13, 14, 15])
    ahead.reach(8)
    settled()
    assert present(tensors[0][:17]) == 1
    assert not present(tensors[0][17:])


def test_pages_that_were_lent_get_memory_again() -> None:
    tensors = on_small_pages()
    ahead = asked(tensors, 8)
    ahead.unmap([6, 7])
    TorchMemory(CPU).unmap(tensors[0][6:8])
    assert not present(tensors[0][6:8])
    ahead.map([6, 7])
    ahead.reach(2)
    settled()
    assert present(tensors[0][:9]) == 1


def test_nothing_beyond_the_end_gets_memory() -> None:
    tensors = cache(40)
    ahead = asked(tensors)
    ahead.reach(39)
    settled()
    assert all(present(tensor) == 1 for tensor in tensors)


def test_a_thread_that_clears_memory_changes_no_byte_that_others_write_meanwhile() -> None:
    tensors = cache()
    ahead = Ahead(tensors, 1000)
    for page in range(0, 2000, 40):
        ahead.reach(page)
        for tensor in tensors:
            tensor[page : page + 40] += 7  # whoever is first, each byte is counted up once
    settled()
    assert all(tensor[:2000].eq(7).all() for tensor in tensors)
