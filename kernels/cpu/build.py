"""Loads the C++ operators: those that came compiled with the wheel (`prebuilt.py`), else those that the
machine's own compiler makes (`compiler.py`). `python -m personae.kernels.cpu.build` compiles them ahead of
the first start.

The environment variable PERSONAE_CPU_INSTRUCTIONS names a poorer set of instructions of `prebuilt.VARIANTS`,
for tests and measurements: `x86-64-v3` is AVX2.
"""

import ctypes
import logging
import os
import shutil
import subprocess
from functools import cache

from personae.errors import KernelError
from personae.kernels.cpu import prebuilt
from personae.kernels.cpu.compiler import built, find_compiler

_log = logging.getLogger("personae.kernels")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operators; None, with a warning, if none came with the wheel and there is no compiler or
    it fails. Raises KernelError if PERSONAE_CPU_INSTRUCTIONS names a set that this processor lacks."""
    import torch  # noqa: F401  # loads its OpenMP runtime first, which the library must use

    asked = _asked_for()
    if (found := prebuilt.find(features=asked and asked.needs)) is not None:
        try:
            loaded = ctypes.CDLL(str(found))
        except OSError as error:
            _log.warning("the CPU kernels that came with the package cannot be loaded: %s", error)
        else:
            _log.info("CPU kernels: compiled for %s, from the package", found.stem)
            return loaded
    compiler = find_compiler()
    if compiler is None:
        _log.warning("There is no C++ compiler. The CPU operators run in plain torch, which is slower.")
        return None
    try:
        return ctypes.CDLL(str(built(compiler, *(asked.flags if asked else ()))))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "The CPU operators could not be built (%s). They run in plain torch, which is slower.", error
        )
        return None


def _asked_for() -> prebuilt.Variant | None:
    """The set of instructions that PERSONAE_CPU_INSTRUCTIONS names; None: this processor's own."""
    name = os.environ.get("PERSONAE_CPU_INSTRUCTIONS")
    if not name:
        return None
    fitting = {variant.name: variant for variant in prebuilt.fitting(prebuilt.features_here())}
    if name not in fitting:
        known = ", ".join(fitting) or "none"
        raise KernelError(f"PERSONAE_CPU_INSTRUCTIONS: this processor has no {name!r}; it has: {known}.")
    return fitting[name]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    raise SystemExit(library() is None and shutil.which("c++") is not None)
