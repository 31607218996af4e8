"""The operators in Triton, for NVIDIA GPUs from Ampere on. The kernels themselves are in `device/`."""

import logging
from importlib.util import find_spec
from subprocess import SubprocessError

import torch

from personae.errors import DriverError
from personae.kernels.registry import Implementation

_log = logging.getLogger("personae.kernels")

OLDEST = (8, 0)  # compute capability: bfloat16 on tensor cores
FP8_CAPABILITY = (8, 9)  # compute capability from which on a GPU converts FP8 in hardware


def operators() -> dict[str, Implementation]:
    """The operators of this backend by name; empty without Triton or without a GPU."""
    if find_spec("triton") is None or torch.version.cuda is None or not torch.cuda.is_available():
        return {}
    from personae.kernels.triton.attention import TYPES
    from personae.kernels.triton.calls import TritonOperators
    from personae.kernels.triton.sizes import Gpu

    processors = torch.cuda.get_device_properties().multi_processor_count
    hopper = torch.cuda.get_device_capability()[0] == 9
    found = TritonOperators(Gpu(processors, hopper)).by_name()
    return {name: Implementation(run, frozenset(TYPES), OLDEST) for name, run in found.items()}


def unavailable() -> str | None:
    """Why a GPU has none of these operators; None if it has them."""
    return None if find_spec("triton") else "needs triton (pip install triton)"


def check_launcher() -> None:
    """Raises DriverError if there are operators but Triton cannot build its launcher, which it compiles when
    it is first used on a machine."""
    if torch.version.cuda is not None and torch.cuda.is_available() and (why := unavailable()) is not None:
        _log.warning("the GPU %s: its operators run in plain torch, which is slower", why)
    if not operators() or torch.cuda.get_device_capability() < OLDEST:
        return
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    except (AssertionError, OSError, RuntimeError, SubprocessError) as error:
        raise DriverError(f"Triton cannot build its kernel launcher: {error}") from error
