"""The driver's calls for virtual memory, simulated: `cuda.bindings.driver` as far as `kernels/vmm.py` uses
it.

The rules are the driver's (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html), and breaking
one fails in the same way: only whole granules; mapped only in a reserved range where nothing is mapped;
unmapped as they were mapped; freed when nothing is mapped. Memory that is not mapped, or not granted yet, is
poison: a kernel that reads it computes NaN, and one that writes it is detected when it is mapped, and at the
end. All calls run on the host at once, however late the streams are. The old content of a newly mapped
granule is poison, too.
"""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paper_gpu.machine import Machine, Mistake, Stream
from paper_gpu.tensors import PaperTensor

UNREGISTERED = "The specified pointer resides on host memory and is not registered with any CUDA device."


class Status(IntEnum):
    """CUresult: the codes that are used here."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    UNKNOWN = 999


class Handle:
    """A granule of memory."""

    def __init__(self) -> None:
        self.mappings = 0
        self.released = False


class Reservation:
    """A range of addresses, and what is mapped there: by granule a handle and whether access was granted."""

    def __init__(self, machine: Machine, size: int, granule: int) -> None:
        whole = torch.full((size + granule,), 0xFF, dtype=torch.uint8)
        first = -whole.data_ptr() % granule
        self.bytes = whole[first : first + size]
        self.address, self.size, self.granule = self.bytes.data_ptr(), size, granule
        self.machine = machine
        self.mapped: dict[int, tuple[Handle, bool]] = {}

    def part(self, address: int, size: int) -> Tensor:
        """Its bytes."""
        return self.bytes[address - self.address : address - self.address + size]

    def accessible(self, address: int) -> bool:
        """Whether memory is mapped there and access to it was granted."""
        place = address - (address - self.address) % self.granule
        return self.mapped.get(place, (None, False))[1]

    def check(self, address: int, size: int) -> None:
        """Raises Mistake if a forbidden address was written."""
        if not bool((self.part(address, size) == 0xFF).all()):
            raise Mistake(f"{size} bytes at {address:#x} were written while nothing was mapped there")


class Mapped:
    """The mapping information of a `PaperTensor`."""

    def __init__(self, reservation: Reservation, owner: object) -> None:
        self.machine, self.owner = reservation.machine, owner
        self.also: list[tuple[Stream, int]] = []
        self._reservation = reservation

    def accessible(self, address: int) -> bool:
        """Whether kernels may read there."""
        return self._reservation.accessible(address)


class PaperDriver:
    """Replaces the module. `fails`: calls that fail from now on. `calls`: their names, in order."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")

    def __init__(self, machine: Machine, granule: int) -> None:
        self.granule, self.able = granule, True
        self.fails: set[str] = set()
        self.calls: list[str] = []
        self.reservations: list[Reservation] = []
        self._machine = machine

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fails:
                return (Status.UNKNOWN, None)
            with self._machine.lock:
                found = getattr(self, f"_{name}")(*args)
            return (found,) if isinstance(found, Status) else (Status.SUCCESS, found)

        return call

    @property
    def held(self) -> int:
        """The bytes of mapped memory."""
        return sum(len(each.mapped) for each in self.reservations) * self.granule

    def check(self) -> None:
        """Raises Mistake if something was written where nothing is mapped."""
        for each in self.reservations:
            for address in range(each.address, each.address + each.size, self.granule):
                if address not in each.mapped:
                    each.check(address, self.granule)

    def tensor(self, owner: Any) -> PaperTensor:
        """The tensor that torch makes of an object with `__cuda_array_interface__`, without a copy."""
        interface = owner.__cuda_array_interface__
        address, _ = interface["data"]
        (size,) = interface["shape"]
        assert (interface["typestr"], interface["strides"], interface["version"]) == ("|u1", None, 3)
        found = self._at(address)
        if found is None or not found.accessible(address):
            raise RuntimeError(UNREGISTERED)
        return PaperTensor(found.part(address, size), Mapped(found, owner))  # type: ignore[arg-type]  # as a Memory

    # The calls

    def _cuDeviceGet(self, number: int) -> int:
        return number

    def _cuDeviceGetAttribute(self, _attribute: str, _device: int) -> int:
        return int(self.able)

    def _cuCtxGetCurrent(self) -> str:
        return "torch's"

    def _cuCtxSetCurrent(self, context: str) -> Status:
        return Status.SUCCESS if context == "torch's" else Status.INVALID_VALUE

    def _cuCtxSynchronize(self) -> Status:
        self._machine.catch_up_all()
        return Status.SUCCESS

    def _cuMemGetAllocationGranularity(self, prop: Any, _option: str) -> Any:
        return self.granule if vars(prop).keys() == {"type", "location"} else Status.INVALID_VALUE

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        if size <= 0 or size % self.granule or alignment & (alignment - 1) or address or flags:
            return Status.INVALID_VALUE
        self.reservations.append(Reservation(self._machine, size, max(alignment, self.granule)))
        return self.reservations[-1].address

    def _cuMemAddressFree(self, address: int, size: int) -> Any:
        found = self._at(address)
        if found is None or (found.address, found.size) != (address, size) or found.mapped:
            return Status.INVALID_VALUE
        if not self._machine.over:
            found.check(address, size)
        self.reservations.remove(found)
        return Status.SUCCESS

    def _cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        if size != self.granule or prop.location.id != 0 or flags:
            return Status.INVALID_VALUE
        if self._machine.live + size > self._machine.total:
            return Status.OUT_OF_MEMORY
        self._machine.live += size
        return Handle()

    def _cuMemRelease(self, handle: Handle) -> Any:
        if handle.released or handle.mappings:
            return Status.INVALID_VALUE
        handle.released = True
        self._machine.live -= self.granule
        return Status.SUCCESS

    def _cuMemMap(self, address: int, size: int, offset: int, handle: Handle, flags: int) -> Any:
        found = self._at(address)
        if found is None or (size, offset, flags) != (self.granule, 0, 0) or handle.released:
            return Status.INVALID_VALUE
        if (address - found.address) % self.granule or address in found.mapped:
            return Status.INVALID_VALUE
        found.check(address, size)
        found.mapped[address] = (handle, False)
        handle.mappings += 1
        return Status.SUCCESS

    def _cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> Any:
        found = self._at(address)
        places = range(address, address + size, self.granule)
        if found is None or size % self.granule or len(descriptions) != count:
            return Status.INVALID_VALUE
        if not all(place in found.mapped for place in places):
            return Status.INVALID_VALUE
        for place in places:
            found.check(place, self.granule)
            found.mapped[place] = (found.mapped[place][0], True)
        return Status.SUCCESS

    def _cuMemUnmap(self, address: int, size: int) -> Any:
        found = self._at(address)
        if found is None or size != self.granule or address not in found.mapped:
            return Status.INVALID_VALUE
        handle, _ = found.mapped.pop(address)
        handle.mappings -= 1
        found.part(address, size).fill_(0xFF)
        return Status.SUCCESS

    def _at(self, address: int) -> Reservation | None:
        inside = (each for each in self.reservations if each.address <= address < each.address + each.size)
        return next(inside, None)
