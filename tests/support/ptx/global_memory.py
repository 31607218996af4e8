"""A GPU's memory as one launch sees it, with what compute-sanitizer would check, and more.

Every byte has a state. Programs of a launch run in no order, so a byte that one writes is no other's to
read or to write. All tables have as many bytes as the memory, so that one access is one element of each.
"""

import numpy as np
from numpy.typing import NDArray

from ptx.faults import Fault
from ptx.numbers import BITS, Array

BASE = 0x7F00_0000_0000
GAP = 512  # bytes between allocations
OUTSIDE, UNWRITTEN, WRITTEN = 0, 1, 2
_NOBODY, _MANY = 0, 0xFFFF
_WIDE = {**BITS, 16: np.dtype(np.complex128)}  # an element of 16 bytes, to be moved only


class GlobalMemory:
    """Allocations of one launch. Addresses are int64; programs are numbered from 1."""

    def __init__(self, size: int) -> None:
        size = -(-(size + GAP) // 16) * 16
        self._bytes = _aligned(size)
        self._state = _aligned(size)
        self._writer = _aligned(size)  # uint16 for every two bytes
        self._reader = _aligned(size)
        self._unfinished = _aligned(size)
        self._top = GAP

    def allocate(
        self,
        data: NDArray[np.uint8],
        unwritten: NDArray[np.bool_] | None,
        unfinished: NDArray[np.bool_] | None,
    ) -> int:
        """The address of a copy of data; `unwritten` bytes must be written before they are read, and
        `unfinished` ones are another launch's until it is waited for."""
        start, end = self._top, self._top + len(data)
        self._top = -(-(end + GAP) // 256) * 256
        self._bytes[start:end] = data
        self._state[start:end] = WRITTEN
        if unwritten is not None:
            self._state[start:end][unwritten] = UNWRITTEN
        if unfinished is not None:
            self._unfinished[start:end] = unfinished
        return BASE + start

    def contents(self, address: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """The bytes there now, and which of them this launch has written."""
        start = address - BASE
        half = self._writer.view(np.uint16)[start // 2 : (start + size + 1) // 2]
        return self._bytes[start : start + size], np.repeat(half != _NOBODY, 2)[:size]

    def load(
        self, addresses: NDArray[np.int64], width: int, programs: NDArray[np.int64], *, early: bool
    ) -> NDArray[np.uint8]:
        """[N, width] bytes. early: the launch before this one may still run."""
        at = self._check(addresses, width, "load")
        if (_element(self._state, width)[at] != _filled(WRITTEN, width)).any():
            where = (_element(self._state, width)[at] != _filled(WRITTEN, width)).argmax()
            raise Fault(f"loads bytes that nobody has written, at {hex(int(addresses[where]))}")
        if early and _element(self._unfinished, width)[at].any():
            raise Fault("loads what the launch before may still be writing: griddepcontrol.wait is missing")
        owner, mark = self._owners(self._writer, at, width), programs.astype(np.uint16)
        if ((owner != _NOBODY) & (owner != mark[:, None])).any():
            raise Fault("loads what another program of the launch writes")
        view, index = self._halves(self._reader, at, width)
        marks = np.broadcast_to(mark[:, None], index.shape)
        seen = view[index]
        view[index] = np.where((seen == _NOBODY) | (seen == marks), marks, _MANY)
        view[index[view[index] != marks]] = _MANY
        found: NDArray[np.uint8] = _element(self._bytes, width)[at].view(np.uint8).reshape(-1, width)
        return found

    def store(
        self,
        addresses: NDArray[np.int64],
        data: NDArray[np.uint8],
        programs: NDArray[np.int64],
        *,
        early: bool,
    ) -> None:
        """Stores data [N, width]."""
        width = data.shape[1]
        at = self._check(addresses, width, "store")
        if early:
            raise Fault("stores while the launch before may still run: griddepcontrol.wait is missing")
        new = np.ascontiguousarray(data).view(_WIDE[width]).ravel()
        place = _element(self._bytes, width)
        raw = np.ascontiguousarray(data).view(BITS[min(width, 8)])
        old = place[at].view(BITS[min(width, 8)]).reshape(raw.shape)
        mark = programs.astype(np.uint16)[:, None]
        changed = (old != raw).any(1)
        writer, reader = self._owners(self._writer, at, width), self._owners(self._reader, at, width)
        if (((writer != _NOBODY) & (writer != mark)).any(1) & changed).any():
            raise Fault("two programs of the launch store different values in one place")
        if (((reader != _NOBODY) & (reader != mark)).any(1) & changed).any():
            raise Fault("stores where another program of the launch loads")
        place[at] = new
        if (place[at].view(BITS[min(width, 8)]).reshape(raw.shape) != raw).any():
            raise Fault("two threads store different values in one place at once")
        _element(self._state, width)[at] = _filled(WRITTEN, width)
        view, index = self._halves(self._writer, at, width)
        view[index] = mark

    def _check(self, addresses: NDArray[np.int64], width: int, what: str) -> NDArray[np.int64]:
        """Elements of that width, all of them within allocations."""
        if (addresses % width).any():
            raise Fault(
                f"misaligned {what} of {width} bytes at {hex(int(addresses[addresses % width != 0][0]))}"
            )
        offset = addresses - BASE
        wild = (offset < 0) | (offset + width > len(self._bytes))
        if wild.any():
            raise Fault(f"{what} at {hex(int(addresses[wild][0]))}, far from every allocation")
        at: NDArray[np.int64] = offset // width
        octets = _element(self._state, width)[at].view(np.uint8).reshape(-1, width)
        if (octets == OUTSIDE).any():
            where = (octets == OUTSIDE).any(1).argmax()
            raise Fault(f"{what} of {width} bytes out of bounds, at {hex(int(addresses[where]))}")
        return at

    @staticmethod
    def _halves(
        table: NDArray[np.uint8], at: NDArray[np.int64], width: int
    ) -> tuple[Array, NDArray[np.int64]]:
        """The table's 16-bit entries, and which belong to the elements, [N, at least 1]."""
        count = max(1, width // 2)
        return table.view(np.uint16), (at * width // 2)[:, None] + np.arange(count)

    def _owners(self, table: NDArray[np.uint8], at: NDArray[np.int64], width: int) -> Array:
        view, index = self._halves(table, at, width)
        return view[index]


def _aligned(size: int) -> NDArray[np.uint8]:
    return np.zeros(size // 16, np.complex128).view(np.uint8)


def _element(table: NDArray[np.uint8], width: int) -> Array:
    return table.view(_WIDE[width])


def _filled(octet: int, width: int) -> np.generic:
    return np.full(width, octet, np.uint8).view(_WIDE[width])[0]
