"""Launches of kernels that Triton has compiled before, without what Triton does in Python for each launch.

Triton finds the compiled kernel of a launch by looking at every argument: the type of a pointer and whether
it is aligned, a number that is 1 or a multiple of 16, each constant by name. That takes some 30 us. Here the
first launch with given numbers and types goes through Triton, which compiles if it has to. Launches that have
the same numbers and types, and aligned pointers, go straight to the compiled kernel.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver

ALIGNMENT = 16  # bytes: kernels are compiled for pointers that are multiples of it, and for others
MOST_BOUND = 1 << 14  # launches that are remembered; a step has a few dozen

Grid = tuple[int, int, int]


class Bound(NamedTuple):
    """A compiled kernel. run: its launcher; stream: finds the device's current one."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    stream: Callable[[int], int]
    device: int


_bound: dict[Hashable, Bound] = {}


class Launch:
    """A kernel and its constants, to be launched with tensors and numbers.

    The kernel's signature has the pointers first, then the numbers, then the constants.
    """

    __slots__ = ("_constants", "_kernel", "_tail")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """constants: the kernel's, and Triton's options (num_warps, num_stages, launch_pdl)."""
        self._kernel, self._constants = kernel, constants
        self._tail: tuple[Any, ...] = ()

    def __call__(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...]) -> None:
        """Launch on the current stream. A number must have one type, int or float, in all launches."""
        key = (self, numbers, *[tensor.dtype for tensor in tensors])
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        bound = None if together % ALIGNMENT else _bound.get(key)
        if bound is None:
            compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
            if compiled is not None and not together % ALIGNMENT:
                self._bind(key, compiled)
            return
        # The three that are None are for profilers that hook into Triton. The launcher passes over constants.
        bound.run(
            *grid,
            bound.stream(bound.device),
            bound.function,
            bound.metadata,
            None,
            None,
            None,
            *addresses,
            *numbers,
            *self._tail,
        )

    def _bind(self, key: Hashable, compiled: Any) -> None:
        """compiled: what Triton returns of a launch."""
        if len(_bound) >= MOST_BOUND:
            _bound.clear()
        constants, active = self._constants, driver.active
        self._tail = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
        _bound[key] = Bound(
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            active.get_current_stream,
            active.get_current_device(),
        )


@cache
def launch(kernel: Any, **constants: Any) -> Launch:
    """The one launch of a kernel with these constants; see `Launch`."""
    return Launch(kernel, **constants)


def forget() -> None:
    """Bind all launches anew: the driver is another one."""
    _bound.clear()
