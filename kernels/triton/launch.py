"""Launches of kernels that Triton has compiled before, without what Triton does in Python for each launch.

Triton finds the compiled kernel of a launch by looking at every argument: the type of a pointer and whether
it is aligned, a number that is 1 or a multiple of 16, each constant by name. That takes some 30 us. Here the
first launch with given numbers and types goes through Triton, which compiles if it has to. Launches that have
the same numbers and types, and aligned pointers, go straight to the driver's call. Where only addresses
change from layer to layer, `Launch.ready` looks the kernel up once for all of them.
"""

from collections.abc import Callable, Hashable
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver

ALIGNMENT = 16  # bytes: kernels are compiled for pointers that are multiples of it, and for others
MOST_BOUND = 1 << 14  # launches that are remembered; a step has a few dozen

Grid = tuple[int, int, int]


class ReadyLaunch(NamedTuple):
    """A compiled kernel. call: the driver's; middle: what it is given between the function and the kernel's
    arguments; stream: finds the device's current one; constants: the kernel's, which are passed over."""

    call: Callable[..., None]
    function: Any
    middle: tuple[Any, ...]
    stream: Callable[[int], int]
    device: int
    constants: tuple[Any, ...]

    def __call__(self, grid: Grid, arguments: tuple[int | float, ...]) -> None:
        """Launch on the current stream, with all arguments but the constants."""
        x, y, z = grid
        self.call(
            x, y, z, self.stream(self.device), self.function, *self.middle, (*arguments, *self.constants)
        )


_bound: dict[Hashable, ReadyLaunch] = {}


class Launch:
    """A kernel and its constants, to be launched with tensors and numbers.

    The kernel's signature has the pointers first, then the numbers, then the constants.
    """

    __slots__ = ("_constants", "_kernel")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """constants: the kernel's, and Triton's options (num_warps, num_stages, launch_pdl)."""
        self._kernel, self._constants = kernel, constants

    def __call__(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...]) -> None:
        """Launch on the current stream. A number must have one type, int or float, in all launches."""
        key = (self, numbers, *[tensor.dtype for tensor in tensors])
        addresses = [tensor.data_ptr() for tensor in tensors]
        misaligned = reduce(or_, addresses) % ALIGNMENT
        bound = None if misaligned else _bound.get(key)
        if bound is None:
            compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
            if compiled is not None and not misaligned:
                self._bind(key, compiled)
            return
        bound(grid, (*addresses, *numbers))

    def ready(self, tensors: tuple[Tensor, ...], numbers: tuple[int | float, ...]) -> ReadyLaunch | None:
        """What launches the kernel with tensors of these types, all aligned, and these numbers; None if it
        has not been launched so."""
        return _bound.get((self, numbers, *[tensor.dtype for tensor in tensors]))

    def _bind(self, key: Hashable, compiled: Any) -> None:
        """compiled: what Triton returns of a launch."""
        if len(_bound) >= MOST_BOUND:
            _bound.clear()
        constants, active = self._constants, driver.active
        call, middle = _call(compiled)
        _bound[key] = ReadyLaunch(
            call,
            compiled.function,
            middle,
            active.get_current_stream,
            active.get_current_device(),
            tuple(constants[name] for name in self._kernel.arg_names if name in constants),
        )


def _call(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Of a compiled kernel, `call` and `middle` of a `ReadyLaunch`: what its launcher would call, or the
    launcher if it does more. What is None is for profilers that hook into Triton, and for scratch memory."""
    run, metadata = compiled.run, compiled.packed_metadata
    try:
        scratch = run.global_scratch_size + run.profile_scratch_size
        cooperates, early = run.launch_cooperative_grid, run.launch_pdl
        types = run.arg_annotations, run.kernel_signature
        call: Callable[..., None] = run.launch
    except (
        AttributeError
    ):  # another launcher than Triton's for CUDA from 3.7 to 3.9; 3.6 has no `arg_annotations`
        scratch = 1
    if scratch:

        def launcher(x: int, y: int, z: int, stream: int, function: Any, arguments: tuple[Any, ...]) -> None:
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

        return launcher, ()
    return call, (cooperates, early, metadata, None, None, None, None, None, *types)


@cache
def launch(kernel: Any, **constants: Any) -> Launch:
    """The one launch of a kernel with these constants; see `Launch`."""
    return Launch(kernel, **constants)


def forget() -> None:
    """Bind all launches anew: the driver is another one."""
    _bound.clear()
