"""Device memory that can be lent, with CUDA's virtual memory management.

Addresses are reserved once and stay. Memory comes in granules of equal size (usually 2 MiB) that can be
mapped at any of them. So kernels, page tables and captured graphs keep their addresses when a granule moves
from one range to another.

The driver's calls run on the host: they do not wait for earlier work of the device. Before memory is
unmapped, the caller must ensure that no launched work uses it.

Functions and rules: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html. The package
cuda-bindings calls them.
"""

import weakref
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from personae.errors import DriverError


class Driver:
    """The driver's calls for one device. A call that fails raises DriverError with its name and its code."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._api = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverError(f"the package cuda-bindings is not installed: {error}") from error
        torch.cuda.synchronize(device)  # makes torch's context current on this thread
        self._context = self.call("cuCtxGetCurrent")
        number = torch.cuda.current_device() if device.index is None else device.index
        api = self._api
        able = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self.call("cuDeviceGetAttribute", able, self.call("cuDeviceGet", number)):
            raise DriverError("the device has no virtual memory management")
        self.prop = api.CUmemAllocationProp()
        self.prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.prop.location.id = number
        self.access = api.CUmemAccessDesc()
        self.access.location = self.prop.location
        self.access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self.call("cuMemGetAllocationGranularity", self.prop, least))

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; returns its results without the status."""
        try:
            status, *found = getattr(self._api, name)(*args)
        except RuntimeError as error:  # the library is missing, or too old for this function
            raise DriverError(f"{name}: {error}") from error
        if int(status):
            raise DriverError(f"{name}: {status!r}")
        return found[0] if found else None

    def settle(self) -> None:
        """Wait for the device. Any thread may call this."""
        self.call("cuCtxSetCurrent", self._context)
        self.call("cuCtxSynchronize")


class DeviceMemory:
    """A `kernels.memory.Memory` on a CUDA device: `size` bytes, rounded up to granules, allocated at once. It
    is freed with the last tensor in it.

    One thread owns it. Raises DriverError if a call fails, or if more memory is requested than is free.
    """

    lends = True

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._driver = driver = Driver(device)
        self.granule = driver.granule
        self._free: list[Any] = []  # granules, by handle
        self._mapped: dict[int, Any] = {}  # by address
        self._ranges: list[tuple[int, int]] = []
        held = (driver, self._free, self._mapped, self._ranges)
        weakref.finalize(self, _release, *held).atexit = False  # at exit the driver may be gone already
        for _ in range(-(-size // self.granule)):
            self._free.append(driver.call("cuMemCreate", self.granule, driver.prop, 0))

    @property
    def free(self) -> int:
        """See Memory."""
        return len(self._free)

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory."""
        size = prod(shape) * dtype.itemsize
        length = -(-size // self.granule) * self.granule
        address = int(self._driver.call("cuMemAddressReserve", length, self.granule, 0, 0))
        self._ranges.append((address, length))
        # torch asks the driver which device the address belongs to, so the first granule is mapped for now.
        self._map(address, 1)
        try:
            flat = torch.as_tensor(_Range(self, address, size), device=self._device)
        except (RuntimeError, ValueError) as error:
            raise DriverError(f"torch does not accept the memory: {error}") from error
        self._unmap(address, 1)
        return flat.view(dtype).view(shape)

    def map(self, part: Tensor) -> None:
        """See Memory."""
        self._map(*self._granules(part))

    def unmap(self, part: Tensor) -> None:
        """See Memory."""
        self._unmap(*self._granules(part))

    def _granules(self, part: Tensor) -> tuple[int, int]:
        """The address of a part and the number of its granules. A tensor may end within the last one."""
        address = part.data_ptr()
        assert part.is_contiguous(), "a part is contiguous"
        assert address % self.granule == 0, "a part begins at a granule"
        return address, -(-part.nbytes // self.granule)

    def _map(self, address: int, count: int) -> None:
        if count > len(self._free):
            raise DriverError(f"{count} granules are needed, {len(self._free)} are free")
        for place in range(address, address + count * self.granule, self.granule):
            self._driver.call("cuMemMap", place, self.granule, 0, self._free[-1], 0)
            self._mapped[place] = self._free.pop()
        self._driver.call("cuMemSetAccess", address, count * self.granule, [self._driver.access], 1)

    def _unmap(self, address: int, count: int) -> None:
        for place in range(address, address + count * self.granule, self.granule):
            self._driver.call("cuMemUnmap", place, self.granule)
            self._free.append(self._mapped.pop(place))


class _Range:
    """An address range for torch to make a tensor of. The tensor keeps this object, which keeps the
    memory."""

    def __init__(self, memory: DeviceMemory, address: int, size: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


def _release(driver: Driver, free: list[Any], mapped: dict[int, Any], ranges: list[tuple[int, int]]) -> None:
    driver.settle()
    for address in mapped:
        driver.call("cuMemUnmap", address, driver.granule)
    for handle in (*free, *mapped.values()):
        driver.call("cuMemRelease", handle)
    for address, length in ranges:
        driver.call("cuMemAddressFree", address, length)
