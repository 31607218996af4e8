"""How much of GPUs' memory the KV cache gets, where ranks have a GPU each."""

from pathlib import Path

import pytest

from personae.actors.options import EngineOptions
from personae.actors.sizing import _device_memory
from personae.engine.parallel.comm import Unconnected
from personae.engine.parallel.expert_placement import NO_GROUPS
from personae.engine.worker.profiling import GpuMemory
from personae.errors import LoadError

GIB = 2**30
APART = Unconnected(0, 4, 0, 1, NO_GROUPS, attention_ranks=2)  # two ranks have attention, two have MLPs
ALL_HAVE_BOTH = Unconnected(0, 4, 0, 1, NO_GROUPS)


def gpus(*free: int) -> list[GpuMemory]:
    """GPUs of 100 GiB with so many GiB free, on which a step takes one."""
    return [GpuMemory(GIB, each * GIB, 100 * GIB) for each in free]


def options(kv_memory: int | None = None) -> EngineOptions:
    return EngineOptions(Path("model"), kv_memory=kv_memory, gpu_memory_utilization=0.9)


def test_memory_that_is_given_is_divided_among_the_ranks_that_have_pages() -> None:
    assert _device_memory(options(8 * GIB), 0, ALL_HAVE_BOTH, gpus(50, 50, 50, 50))[0] == 2 * GIB
    assert _device_memory(options(8 * GIB), 0, APART, gpus(50, 50, 50, 50))[0] == 4 * GIB


def test_a_rank_without_pages_does_not_decide_how_many_there_are() -> None:
    def asked(comm: Unconnected, *free: int) -> float:
        return _device_memory(options(), GIB, comm, gpus(*free))[0] / GIB

    assert asked(ALL_HAVE_BOTH, 50, 60, 30, 80) == pytest.approx(30 - 10 - 1 - 1)
    assert asked(APART, 50, 60, 30, 80) == pytest.approx(50 - 10 - 1 - 1)


def test_a_rank_without_pages_has_room_for_a_step_and_its_adapters() -> None:
    said = "A GPU without attention has 3GiB free besides the weights: too little for a step (1GiB) and up to"
    with pytest.raises(LoadError) as caught:
        _device_memory(options(), 3 * GIB, APART, gpus(50, 50, 50, 3))
    assert caught.value.message.startswith(said)
