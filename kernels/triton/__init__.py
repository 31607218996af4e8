"""The operators in Triton, for NVIDIA GPUs from Ampere on; the kernels themselves are in `device/`."""

from collections.abc import Callable
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch

from personae.errors import DriverError

OLDEST = (8, 0)  # compute capability: bfloat16 on tensor cores
FP8_CAPABILITY = (8, 9)  # from which on a GPU converts FP8 by itself


def operators() -> dict[str, Callable[..., Any]]:
    """The operators of this backend by name; empty without Triton or without such a GPU."""
    if find_spec("triton") is None or torch.version.cuda is None or not torch.cuda.is_available():
        return {}
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return {}
    from personae.kernels.triton.calls import TritonOperators
    from personae.kernels.triton.sizes import Gpu

    processors = torch.cuda.get_device_properties().multi_processor_count
    return TritonOperators(Gpu(processors, hopper=capability[0] == 9)).by_name()


def check_launcher() -> None:
    """Raises DriverError where there are operators, and Triton cannot make what it launches them with: that
    it compiles when it is first used on a machine."""
    if not operators():
        return
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    except (AssertionError, OSError, RuntimeError, SubprocessError) as error:
        raise DriverError(f"Triton cannot make what it launches kernels with: {error}") from error
