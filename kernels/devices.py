"""Counts the GPUs without loading torch."""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def cuda_devices() -> int:
    """The number of GPUs that torch would use, without those hidden by CUDA_VISIBLE_DEVICES; 0 if torch has
    no CUDA."""
    return _counted() if _torch_has_cuda() else 0


def visible_devices() -> list[str]:
    """The GPUs that torch would use, each as CUDA_VISIBLE_DEVICES has it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(cuda_devices())]


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
