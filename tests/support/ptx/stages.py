"""What one kernel leaves for the next, to be compared with a reference.

A wrong number there may change nothing in a case's result, and another result with other numbers. `Stages`
looks at each launch of a host function; `checks` has what is to be compared afterwards.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptx.cases import Check

Array = NDArray[Any]
Given = dict[str, Any]
_TYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32)


class Stages:
    """What to look at: by kernel a function of the arguments. Tensors of types that NumPy has are arrays."""

    def __init__(self, looks: dict[str, Callable[[Given], list[Check]]]) -> None:
        self.checks: list[Check] = []
        self._looks = looks

    def look(self, kernel: str, arguments: Given) -> None:
        """After a launch."""
        if kernel in self._looks:
            given = {name: _array(value) for name, value in arguments.items()}
            self.checks += self._looks[kernel](given)


def _array(value: Any) -> Any:
    """A tensor of a type that NumPy has, as an array."""
    return value.numpy() if isinstance(value, torch.Tensor) and value.dtype in _TYPES else value


def same(found: Array, truth: Array) -> Check:
    """Not a bit's difference."""
    return Check(torch.from_numpy(found.copy()), torch.from_numpy(np.ascontiguousarray(truth)), 0)


def close(found: Array, truth: Array, tolerance: float) -> Check:
    """Each number by itself, in shares of the truth, all together in norm; zeros are exact."""
    zero = truth == 0
    shares = np.where(zero, 1 + np.abs(found), found / np.where(zero, 1, truth))
    return Check(torch.from_numpy(shares).double().flatten(), torch.ones(shares.size).double(), tolerance)
