"""Memory that moves behind addresses that stay, on a driver made of paper."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from paper_gpu import Mistake, PaperGpu  # noqa: E402  # below the mark, which says what they need

from personae.errors import DriverError  # noqa: E402
from personae.kernels.memory import granule_of, memory_of  # noqa: E402
from personae.kernels.vmm import DeviceMemory  # noqa: E402

CUDA = torch.device("cuda")
GRANULE = 1 << 12


@pytest.fixture
def gpu() -> Iterator[PaperGpu]:
    with PaperGpu(1 << 20, granule=GRANULE) as paper:
        yield paper


def test_what_one_range_gives_back_another_can_have_and_no_address_changes(gpu: PaperGpu) -> None:
    memory = DeviceMemory(CUDA, 4 * GRANULE)
    cache = memory.reserve((4, GRANULE // 2), torch.bfloat16)
    weight_pool = memory.reserve((4, GRANULE // 2), torch.bfloat16)
    addresses = cache.data_ptr(), weight_pool.data_ptr()
    memory.map(cache)
    cache.fill_(3)
    with pytest.raises(DriverError, match="1 granules are needed, 0 are free"):
        memory.map(weight_pool[:1])
    torch.cuda.synchronize()
    memory.unmap(cache[1:3])
    memory.map(weight_pool[2:4])
    weight_pool[2:4].fill_(5)
    assert (weight_pool[2:4] == 5).all()
    assert (cache[::3] == 3).all()
    assert torch.isnan(cache[1:3]).all(), "there is nothing"
    torch.cuda.synchronize()
    memory.unmap(weight_pool[3])
    memory.map(cache[2])
    assert torch.isnan(cache[2]).all(), "it comes as it was left, which is nobody's business"
    cache[2].fill_(7)
    assert (cache[2] == 7).all()
    assert (cache.data_ptr(), weight_pool.data_ptr()) == addresses
    assert memory.free == 0


def test_a_tensor_may_end_within_a_granule(gpu: PaperGpu) -> None:
    memory = DeviceMemory(CUDA, 2 * GRANULE)
    assert memory.free == 2
    ragged = memory.reserve((GRANULE + 6,), torch.uint8)
    memory.map(ragged)
    assert memory.free == 0
    ragged.fill_(1)
    assert ragged.sum().item() == GRANULE + 6
    memory.unmap(ragged[GRANULE:])
    assert memory.free == 1


def test_a_part_that_begins_within_a_granule_is_refused(gpu: PaperGpu) -> None:
    memory = DeviceMemory(CUDA, 2 * GRANULE)
    with pytest.raises(AssertionError, match="begins at a granule"):
        memory.map(memory.reserve((2 * GRANULE,), torch.uint8)[16:])


def test_memory_is_freed_with_its_last_tensor(gpu: PaperGpu) -> None:
    before = gpu.machine.live
    tensor = DeviceMemory(CUDA, 8 * GRANULE).reserve((GRANULE,), torch.float32)
    view = tensor[3:5]
    del tensor
    gc.collect()
    assert gpu.machine.live == before + 8 * GRANULE
    assert gpu.driver is not None
    assert len(gpu.driver.reservations) == 1
    del view
    gc.collect()
    assert gpu.machine.live == before
    assert gpu.driver.reservations == []


def test_more_than_the_device_has_fails_and_nothing_is_kept(gpu: PaperGpu) -> None:
    with pytest.raises(DriverError, match=r"cuMemCreate: .*OUT_OF_MEMORY"):
        memory_of(CUDA, 2 << 20)
    gc.collect()
    assert gpu.machine.live == 0


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuDeviceGetAttribute", "cuDeviceGet"])
def test_a_driver_that_fails_is_named_and_lends_nothing(gpu: PaperGpu, call: str, caplog) -> None:
    assert gpu.driver is not None
    assert granule_of(CUDA) == GRANULE
    gpu.driver.fails.add(call)
    assert granule_of(CUDA) is None
    assert [record.message for record in caplog.records if call in record.message]


def test_a_driver_that_is_not_found_or_too_old_is_named_and_lends_nothing(
    gpu: PaperGpu, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError('Function "cuMemGetAllocationGranularity" not found')  # as cuda-bindings has it

    monkeypatch.setattr(gpu.driver, "cuMemGetAllocationGranularity", missing, raising=False)
    assert granule_of(CUDA) is None
    assert "not found" in caplog.records[0].message


def test_without_the_package_or_the_ability_the_shares_are_fixed(gpu: PaperGpu, caplog) -> None:
    assert gpu.driver is not None
    gpu.driver.able = False
    assert granule_of(CUDA) is None
    with PaperGpu(1 << 20):
        assert granule_of(CUDA) is None
        assert not memory_of(CUDA, 0).lends
    causes = [record.message.split(": ", 1)[1] for record in caplog.records]
    assert causes[0] == "the device has no virtual memory management"
    assert causes[1].startswith("the package cuda-bindings is not installed")


def late_write(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    tensor.fill_(1)  # launched, and late
    memory.unmap(tensor)


def early_write(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    torch.cuda.synchronize()
    memory.unmap(tensor)
    tensor.fill_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("wrong", [late_write, early_write])
def test_who_writes_where_nothing_is_mapped_is_found_out(wrong) -> None:
    def run() -> None:
        with PaperGpu(granule=GRANULE):
            memory = DeviceMemory(CUDA, GRANULE)
            tensor = memory.reserve((GRANULE,), torch.uint8)
            memory.map(tensor)
            wrong(memory, tensor)

    with pytest.raises(Mistake, match="were written while nothing was mapped"):
        run()


def double_unmap(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory.unmap(tensor)
    memory._driver.call("cuMemUnmap", tensor.data_ptr(), GRANULE)


def created(memory: DeviceMemory) -> Any:
    return memory._driver.call("cuMemCreate", GRANULE, memory._driver.prop, 0)


def double_map(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory._driver.call(
        "cuMemMap",
        tensor.data_ptr(),
        GRANULE,
        0,
        created(memory),
        0,
    )


def map_at_another_address(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory._driver.call(
        "cuMemMap",
        tensor.data_ptr() + GRANULE,
        GRANULE,
        0,
        created(memory),
        0,
    )


def map_askew(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory.unmap(tensor)
    memory._driver.call(
        "cuMemMap",
        tensor.data_ptr() + 512,
        GRANULE,
        0,
        created(memory),
        0,
    )


def release_mapped(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory._driver.call("cuMemRelease", memory._mapped[tensor.data_ptr()])


def free_mapped(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory._driver.call("cuMemAddressFree", tensor.data_ptr(), GRANULE)


def grant_unmapped(memory: DeviceMemory, tensor: torch.Tensor) -> None:
    memory.unmap(tensor)
    memory._driver.call("cuMemSetAccess", tensor.data_ptr(), GRANULE, [memory._driver.access], 1)


@pytest.mark.parametrize(
    "wrong",
    [
        double_unmap,
        double_map,
        map_at_another_address,
        map_askew,
        release_mapped,
        free_mapped,
        grant_unmapped,
    ],
)
def test_the_driver_on_paper_refuses_what_the_driver_does(wrong) -> None:
    gpu = PaperGpu(granule=GRANULE)
    with gpu:
        memory = DeviceMemory(CUDA, GRANULE)
        tensor = memory.reserve((GRANULE,), torch.uint8)
        memory.map(tensor)
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            wrong(memory, tensor)
