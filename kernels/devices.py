"""Counts the GPUs without loading torch."""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def cuda_devices() -> int:
    """The number of GPUs that torch would use, without those hidden by CUDA_VISIBLE_DEVICES; 0 if torch has
    no CUDA."""
    return _counted() if _torch_has_cuda() else 0


def _counted() -> int:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:  # no driver
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(next(Path(folder, "lib").glob("*torch_cuda.*"), None) for folder in folders)
