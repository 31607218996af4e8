"""Memory is taken when it is written, and can be given back without losing its place."""

import mmap
import platform
import resource
from pathlib import Path

import pytest
import torch

from personae.kernels.malloc import give_back_freed
from personae.kernels.memory import memory_of, unmapping_pages, zeros

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="only Linux tells a process's memory there"
)
CPU = torch.device("cpu")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def test_what_is_given_back_is_taken_anew_in_the_same_place_and_nothing_else_changes() -> None:
    pages = zeros((64, 2**20), torch.float32, CPU)
    pages.fill_(7)
    address, full = pages.data_ptr(), resident()
    assert len([*unmapping_pages(memory_of(CPU, 0), pages, [3, *range(20, 52)])]) == 2, "two runs"
    assert full - resident() > 30 * 2**22
    assert all((pages[id] == 7).all() for id in (0, 2, 4, 19, 52, 63))
    pages[30].fill_(5)
    assert (pages[30] == 5).all()
    assert pages.data_ptr() == address


def test_a_part_smaller_than_the_system_s_pages_stays() -> None:
    small = zeros((1000,), torch.float32, CPU)
    small.fill_(7)
    memory_of(CPU, 0).unmap(small[1:9])
    assert (small == 7).all()


def test_memory_begins_where_a_page_of_the_system_does() -> None:
    for shape in ((3,), (1000, 7), (4, 2**20)):
        found = zeros(shape, torch.bfloat16, CPU)
        assert found.data_ptr() % mmap.PAGESIZE == 0
        assert found.shape == shape
        assert not found.any()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone gives such memory back")
def test_what_was_freed_between_things_that_stay_is_given_back() -> None:
    things = [torch.ones(25_000) for _ in range(1000)]
    full = resident()
    del things[::2]
    give_back_freed()
    assert full - resident() > 30 * 2**20
    assert all((thing == 1).all() for thing in things)
