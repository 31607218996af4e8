"""The device properties and arithmetic that block shapes are computed from."""

from dataclasses import dataclass

import torch
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


FEW = 16  # rows up to which a program takes a narrow block of outputs, so that all multiprocessors read


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Of a product with weights in few bits: rows and outputs of a program, and inputs of a step."""

    rows: int
    columns: int
    depth: int
    stages: int


def product_tile(rows: int, dtype: torch.dtype) -> ProductTile:
    """The tile for so many rows."""
    if dtype is torch.float32:  # which has no tensor cores, and whose large tiles would spill
        return ProductTile(16, columns=32, depth=32, stages=3)
    if rows <= FEW:
        return ProductTile(16, columns=32, depth=128, stages=3)
    return ProductTile(64, columns=64, depth=64, stages=1)  # see `FENCES`: so no copy is in flight
