"""The shared memory of a wave of programs, with what racecheck would check.

Between two barriers a byte that one warp writes is no other warp's to read or to write. Bytes of a
`cp.async` are there from its wait on, and until then nobody's. What Hopper's matrix instructions read must
have been made visible to them by a fence, and stays as it is until they have been waited for.

Programs lie one after the other, `stride` bytes apart; addresses are of the whole wave. All tables have as
many bytes as the memory. A warp is a bit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptx.faults import Fault
from ptx.numbers import BITS, Array

_WIDE = {**BITS, 16: np.dtype(np.complex128)}


@dataclass
class _Copy:
    """Bytes on their way. generation: of each thread's program, how many groups it had committed before."""

    at: NDArray[np.int64]
    width: int
    data: NDArray[np.uint8]
    warps: NDArray[np.uint8]
    programs: NDArray[np.int64]
    generation: NDArray[np.int64]


class SharedMemory:
    """`size` bytes for each of `programs`."""

    def __init__(self, size: int, programs: int) -> None:
        self.size = size
        self.stride = -(-max(size, 16) // 1024) * 1024
        total = self.stride * programs
        self._bytes = np.zeros(total // 16, np.complex128).view(np.uint8)
        self._bytes[:] = 0xAA
        self._written = np.zeros(total // 16, np.complex128).view(np.uint8)
        self._writers = np.zeros_like(self._written)  # since the last barrier, as the next
        self._readers = np.zeros_like(self._written)
        self._coming = np.zeros_like(self._written)
        self._multiplied = np.zeros_like(self._written)  # read by matrix instructions on their way
        self._unfenced = np.zeros_like(self._written)
        self._copies: list[_Copy] = []
        self._committed = np.zeros(programs, np.int64)

    def place(self, addresses: NDArray[np.int64], programs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Addresses within the programs as addresses within the wave."""
        if ((addresses < 0) | (addresses >= self.size)).any():
            raise Fault(f"shared memory out of bounds: at {int(addresses.max())} of {self.size}")
        return addresses + programs * self.stride

    def load(self, addresses: NDArray[np.int64], width: int, warps: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[N, width] bytes, each thread as a warp's."""
        at = self._check(addresses, width)
        self._expect_delivered(at, width, "reads")
        bits = _spread(warps, width)
        others = _octets(self._writers, at, width) & ~bits
        if others.any():
            raise Fault("shared race: a warp reads what another has written since the last barrier")
        for bit in np.unique(warps):  # threads of a warp may read the same bytes
            own = at[warps == bit]
            view = self._readers.view(_lanes(width)).reshape(-1, max(1, width // 8))
            view[own] |= _repeated(bit, width)
        found: NDArray[np.uint8] = self._bytes.view(_WIDE[width])[at].view(np.uint8).reshape(-1, width)
        return found

    def store(self, addresses: NDArray[np.int64], data: NDArray[np.uint8], warps: NDArray[np.uint8]) -> None:
        """Stores data [N, width], each thread as a warp's."""
        width = data.shape[1]
        at = self._check(addresses, width)
        self._expect_free(at, width, warps)
        self._bytes.view(_WIDE[width])[at] = np.ascontiguousarray(data).view(_WIDE[width]).ravel()
        stored = self._bytes.view(_WIDE[width])[at].view(np.uint8).reshape(-1, width)
        if (stored != data).any():
            raise Fault("shared race: two threads store different values in one place at once")
        self._take(at, width, warps)

    def barrier(self, programs: NDArray[np.bool_]) -> None:
        """What was written and read before is everybody's."""
        for table in (self._writers, self._readers):
            table.reshape(len(programs), -1)[programs] = 0

    def touched(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """By byte, the warps that have written it and those that have read it since the last barrier."""
        return self._writers.copy(), self._readers.copy()

    # Asynchronous copies.

    @property
    def copies_in_flight(self) -> bool:
        """Whether one has not been waited for."""
        return bool(self._copies)

    def newest_copy(self) -> NDArray[np.uint8]:
        """The data [N, width] that the newest will deliver."""
        return self._copies[-1].data

    def copy(
        self,
        addresses: NDArray[np.int64],
        data: NDArray[np.uint8],
        warps: NDArray[np.uint8],
        programs: NDArray[np.int64],
    ) -> None:
        """Begins to write data [N, width]."""
        width = data.shape[1]
        at = self._check(addresses, width)
        if len(np.unique(at)) != len(at):
            raise Fault("two threads copy to the same bytes")
        self._expect_free(at, width, warps)
        self._coming.view(_WIDE[width])[at] = _repeated(1, width).view(_WIDE[width])[0]
        self._copies.append(_Copy(at, width, data, warps, programs, self._committed[programs]))

    def commit_copies(self, programs: NDArray[np.bool_]) -> None:
        """The copies so far are a group."""
        self._committed[programs] += 1

    def await_copies(self, programs: NDArray[np.bool_], pending: int | None) -> None:
        """Lands all groups but the newest `pending`; None: all copies, committed or not."""
        left = []
        for copy in self._copies:
            landed = programs[copy.programs]
            if pending is not None:
                landed &= copy.generation < self._committed[copy.programs] - pending
            if not landed.any():
                left.append(copy)
                continue
            at, width = copy.at[landed], copy.width
            self._bytes.view(_WIDE[width])[at] = copy.data[landed].view(_WIDE[width]).ravel()
            self._coming.view(_WIDE[width])[at] = 0
            self._take(at, width, copy.warps[landed])
            if not landed.all():
                kept = ~landed
                left.append(
                    _Copy(
                        copy.at[kept],
                        width,
                        copy.data[kept],
                        copy.warps[kept],
                        copy.programs[kept],
                        copy.generation[kept],
                    )
                )
        self._copies = left

    # Hopper's matrix instructions, which read by themselves.

    def fence(self, programs: NDArray[np.bool_]) -> None:
        """Stores before it are visible to matrix instructions, after a barrier."""
        self._unfenced.reshape(len(programs), -1)[programs] = 0

    def multiply(self, at: NDArray[np.int64]) -> NDArray[np.uint16]:
        """16-bit elements that a matrix instruction begins to read."""
        self._expect_delivered(at, 2, "multiplies")
        if self._writers.view(np.uint16)[at].any():
            raise Fault("shared race: wgmma reads what was written since the last barrier")
        if self._unfenced.view(np.uint16)[at].any():
            raise Fault("wgmma reads what no fence.proxy.async has made visible to it")
        self._multiplied.view(np.uint16)[at] += np.uint16(0x0101)
        found: NDArray[np.uint16] = self._bytes.view(np.uint16)[at]
        return found

    def multiplied(self, at: NDArray[np.int64], warps: int) -> None:
        """A matrix instruction has been waited for: from here on it is as if these warps had read."""
        self._multiplied.view(np.uint16)[at] -= np.uint16(0x0101)
        self._readers.view(np.uint16)[at] |= np.uint16(warps * 0x0101)

    def _check(self, addresses: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        if (addresses % width).any():
            raise Fault(f"misaligned access to {width} bytes of shared memory")
        within = addresses % self.stride
        if (within + width > self.size).any():
            raise Fault(f"shared memory out of bounds: at {int(within.max())} of {self.size}")
        return addresses // width

    def _expect_delivered(self, at: NDArray[np.int64], width: int, what: str) -> None:
        if self._coming.view(_WIDE[width])[at].any():
            raise Fault(f"{what} bytes of a cp.async that has not been waited for")
        if (_octets(self._written, at, width) == 0).any():
            raise Fault(f"{what} shared bytes that nobody has written")

    def _expect_free(self, at: NDArray[np.int64], width: int, warps: NDArray[np.uint8]) -> None:
        """Of a write; also of what is there already, since that is so with these numbers only."""
        if self._coming.view(_WIDE[width])[at].any():
            raise Fault("writes to bytes of a cp.async on its way")
        if self._multiplied.view(_WIDE[width])[at].any():
            raise Fault("writes to bytes that a wgmma may still read")
        bits = _spread(warps, width)
        if (_octets(self._writers, at, width) & ~bits).any():
            raise Fault("shared race: a warp writes what another has written since the last barrier")
        if (_octets(self._readers, at, width) & ~bits).any():
            raise Fault("shared race: a warp writes what another has read since the last barrier")

    def _take(self, at: NDArray[np.int64], width: int, warps: NDArray[np.uint8]) -> None:
        """Notes who wrote."""
        wide = _WIDE[width]
        self._writers.view(wide)[at] = np.ascontiguousarray(_spread(warps, width)).view(wide).ravel()
        self._written.view(wide)[at] = _repeated(1, width).view(wide)[0]
        self._unfenced.view(wide)[at] = _repeated(1, width).view(wide)[0]


def _octets(table: NDArray[np.uint8], at: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = table.view(_WIDE[width])[at].view(np.uint8).reshape(-1, width)
    return found


def _spread(warps: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return np.repeat(warps, width).reshape(-1, width)


def _lanes(width: int) -> np.dtype:
    """What an access is or-ed in: 16 bytes are two of 8."""
    return BITS[min(width, 8)]


def _repeated(octet: int, width: int) -> Array:
    return np.full(width, octet, np.uint8).view(_lanes(width))
