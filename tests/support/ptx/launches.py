"""Within `with`, what a host function launches is compiled for a GPU that is not here, and interpreted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton_aot import Launch, compile_launch

from ptx.execute import Argument, Buffer, Prepared, execute, prepare
from ptx.numbers import BITS
from ptx.wave import Counts

# What marks an element that nobody has written: a NaN, or a number, that nothing computes.
UNWRITTEN = {
    torch.float64: 0x7FF8_DEAD_DEAD_DEAD,
    torch.float32: 0x7FC0_DEAD,
    torch.float16: 0x7EDA,
    torch.bfloat16: 0x7FDA,
    torch.float8_e4m3fn: 0x7F,
    torch.int64: 0xDEAD_DEAD_DEAD_DEAD,
    torch.int32: 0xDEAD_DEAD,
}
Change = Callable[[str, Prepared], Prepared]


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of which no kernel may read what it has not written."""
    size = dtype.itemsize
    # Of 8 bits every value may have been computed, so none is a mark.
    whole = np.full(shape, UNWRITTEN.get(dtype, 0xDD), BITS[size])
    return torch.from_numpy(whole.view(np.uint8)).view(dtype).view(shape)


Look = Callable[[str, dict[str, Any]], None]
_LOOKS: list[Look] = []


@contextmanager
def watched(look: Look) -> Iterator[None]:
    """Within the block `look` is called after every interpreted launch, with its kernel's name and its
    arguments by name."""
    _LOOKS.append(look)
    try:
        yield
    finally:
        _LOOKS.remove(look)


@dataclass
class Run:
    """One launch: its kernel's name and PTX, and what it did."""

    kernel: str
    ptx: str
    counts: Counts


class Interpreted:
    """capability: 80, 90. change: from a kernel's PTX and what is to run to what runs instead. runs: in
    order. longest: the most instructions that a thread may execute.

    `torch.empty` gives tensors whose elements must be written before they are read. Of a tensor that a kernel
    is given, elements that `unwritten` has made may not be read either.
    """

    def __init__(self, capability: int, change: Change | None = None, longest: int | None = None) -> None:
        self.capability, self.runs = capability, list[Run]()
        self._change, self._longest = change, longest
        self._before: dict[int, NDArray[np.bool_]] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Interpreted":
        def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(Launch.of(kernel, args, kwargs), grid)

        def unwritten_or_meta(empty: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            made = empty(*args, **kwargs)
            if made.device.type == "cpu" and made.dtype in UNWRITTEN:
                made.copy_(unwritten(*made.shape, dtype=made.dtype))
            return made

        self._patch.setattr(JITFunction, "run", run)
        for name in ("empty", "empty_like"):
            self._patch.setattr(torch, name, partial(unwritten_or_meta, getattr(torch, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()

    def _launch(self, launch: Launch, grid: tuple[int, ...]) -> None:
        binary, names = _compiled(launch, self.capability)
        early = bool(launch.options.get("launch_pdl"))
        buffers = _Buffers(self._before if early else {})
        arguments = [buffers.argument(launch.arguments[name]) for name in names]
        ptx = binary.asm["ptx"]
        kernel = prepare(ptx)
        if self._change is not None:
            kernel = self._change(ptx, kernel)
        counts = execute(
            kernel,
            grid,
            arguments,
            threads=32 * binary.metadata.num_warps,
            shared=binary.metadata.shared,
            early=early,
            longest=self._longest,
        )
        self.runs.append(Run(launch.kernel.__name__, ptx, counts))
        self._before = buffers.written()
        for look in _LOOKS:
            look(launch.kernel.__name__, launch.arguments)


_COMPILED: dict[str, tuple[Any, list[str]]] = {}


def _compiled(launch: Launch, capability: int) -> tuple[Any, list[str]]:
    key = launch.key(capability)
    if key not in _COMPILED:
        _COMPILED[key] = compile_launch(launch, capability)
    return _COMPILED[key]


class _Buffers:
    """The memory of a launch's tensors: one buffer for each storage, which is changed in place."""

    def __init__(self, unfinished: dict[int, NDArray[np.bool_]]) -> None:
        self._unfinished = unfinished
        self._found: dict[int, Buffer] = {}

    def argument(self, value: Any) -> Argument:
        if not isinstance(value, Tensor):
            return value if isinstance(value, float) else int(value)
        storage = value.untyped_storage()
        start = storage.data_ptr()
        if start not in self._found:
            octets = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
            self._found[start] = Buffer(octets, _marked(octets, value.dtype), self._unfinished.get(start))
        return self._found[start], value.data_ptr() - start

    def written(self) -> dict[int, NDArray[np.bool_]]:
        """By storage, what the launch has written."""
        return {start: buffer.written for start, buffer in self._found.items()}


def _marked(octets: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.bool_] | None:
    """The bytes of elements that nobody has written."""
    if dtype not in UNWRITTEN or len(octets) % dtype.itemsize:
        return None
    marks = octets.view(BITS[dtype.itemsize]) == UNWRITTEN[dtype]
    return np.repeat(marks, dtype.itemsize) if marks.any() else None
