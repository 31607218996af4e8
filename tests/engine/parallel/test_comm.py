"""What ranks exchange in shared memory: sums in the order of the ranks, and parts one after the other."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_harness import comms_of
from torch import Tensor

from personae.engine.parallel import shared_file
from personae.engine.parallel.comm import ONE_RANK, SharedMemory
from personae.engine.parallel.shared_file import new_shared_file


def on_all(size: int, parts: list[Tensor], *, widths: list[int] | None = None) -> list[Tensor]:
    """The result of each rank."""
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(
                lambda comm, part: comm.all_reduce(part) if widths is None else comm.all_gather(part, widths),
                comms_of(size),
                [part.clone() for part in parts],
            )
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_rounded_once_in_the_order_of_the_ranks_and_equal_on_all(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "SLOT_BYTES", 1024)  # several parts
    parts = list(torch.randn(size, 13, 97, generator=torch.Generator().manual_seed(size)).to(dtype))
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    for found in on_all(size, parts):
        assert torch.equal(found, total.to(dtype))


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it() -> None:
    parts = list(torch.randn(4, 32, 64))
    together = on_all(4, parts)[0]
    for row in range(32):
        assert torch.equal(on_all(4, [part[row : row + 1] for part in parts])[0][0], together[row])


def test_a_sum_of_a_strided_view_is_the_views() -> None:
    parts = [torch.randn(5, 8)[:, ::2] for _ in range(2)]
    assert torch.equal(on_all(2, parts)[1], parts[0] + parts[1])


def test_parts_of_different_widths_are_gathered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "SLOT_BYTES", 1024)
    widths = [100, 101, 99]
    parts = [torch.randn(7, width) for width in widths]
    for found in on_all(3, parts, widths=widths):
        assert torch.equal(found, torch.cat(parts, 1))


def test_a_rank_that_waits_for_one_that_has_ended_says_so() -> None:
    def check() -> None:
        raise RuntimeError("rank 1 ended")

    file = new_shared_file(2)
    comm = SharedMemory(file, 0, 2, check)
    os.close(file)
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        comm.all_reduce(torch.ones(3))


def test_one_rank_gives_back_what_it_gets() -> None:
    x = torch.ones(2, 3)
    assert ONE_RANK.all_reduce(x) is x
    assert ONE_RANK.all_gather(x, [3]) is x
