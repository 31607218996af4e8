"""The device properties and arithmetic that block shapes are computed from."""

from dataclasses import dataclass

import triton

# From 3.7 on Triton places the fences between copies to shared memory and Hopper's matrix instructions (its
# pull request 9610). Before, kernels whose both operands come by such copies are not pipelined.
FENCES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


@dataclass(frozen=True, slots=True)
class Gpu:
    """processors: streaming multiprocessors. hopper: whether it has the matrix instructions for 64 rows at
    once."""

    processors: int
    hopper: bool


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
