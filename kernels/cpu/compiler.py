"""Compiles the C++ operators with the machine's own compiler.

A library that is compiled here is in the user's cache folder. Its name is a hash of the sources, the
compiler, the flags and the processor. So changed sources or another machine give another library, and a stale
one is never loaded.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from personae.kernels.cache_folder import cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "decoder.cpp"))
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)
OPENMP = "-fopenmp"
"""Not on macOS: Apple's compiler has no OpenMP. There only the team of threads shares out work (`team.h`)."""

APPLE = {"i8mm": "-mcpu=apple-m2", "asimddp": "-mcpu=apple-m1"}
"""By feature, the richest first: the flag for Apple's processors that have it."""

SVE_BITS = (256, 512)
"""Lengths of SVE's registers that `vector.h` knows. With others it uses NEON."""

_PR_SVE_GET_VL = 51  # of prctl

_log = logging.getLogger("personae.kernels")


def find_compiler() -> str | None:
    """The path of the machine's C++ compiler, $CXX first."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def compile_library(compiler: str, to: Path, *flags: str) -> None:
    """Compiles the operators into a shared library, with `flags` after FLAGS. Raises OSError and
    subprocess.SubprocessError."""
    subprocess.run(  # noqa: S603  # the machine's own compiler
        [compiler, *_flags(), *flags, "-o", str(to), *map(str, SOURCES)],
        check=True,
        capture_output=True,
        timeout=900,  # on a busy machine
    )


def built(compiler: str, *flags: str) -> Path:
    """The library in the cache folder, compiled if it is not there: with `flags` for any processor that they
    allow, without for this one. Raises OSError and subprocess.SubprocessError."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout  # noqa: S603  # as above
    sources = [path.read_bytes() for path in (*SOURCES, *sorted(SOURCES[0].parent.glob("*.h")))]
    made_from = b"\0".join(
        [*sources, version, " ".join((*_flags(), *flags)).encode(), *(() if flags else (_processor(),))]
    )
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"kernels-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    if not target.exists():
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together wait for the one that compiles
            if not target.exists():
                _compile(compiler, target, *flags)
    return target


def _compile(compiler: str, target: Path, *flags: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        made = Path(unfinished) / "kernels.so"
        _log.info("compiling CPU kernels (once, about a minute)")
        compile_library(compiler, made, *flags)
        made.replace(target)  # atomic: a library that is there is whole


def _flags() -> tuple[str, ...]:
    """The flags for this system and processor; a later -march replaces theirs."""
    if sys.platform == "darwin":
        features = apple_features()
        fitting = (flag for feature, flag in APPLE.items() if feature in features)
        return (*FLAGS, next(fitting, "-march=native"))
    bits = sve_bits()
    return (*FLAGS, OPENMP, "-march=native", *((f"-msve-vector-bits={bits}",) if bits in SVE_BITS else ()))


def apple_features() -> frozenset[str]:
    """What macOS says that this processor has of ARM's instructions, by Linux's names; nothing on Intel's."""
    if platform.machine() != "arm64":
        return frozenset()
    names = {"i8mm": b"hw.optional.arm.FEAT_I8MM", "asimddp": b"hw.optional.arm.FEAT_DotProd"}
    ask = ctypes.CDLL(None).sysctlbyname
    found = {"asimd"}
    for feature, name in names.items():
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        if ask(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value:
            found.add(feature)
    return frozenset(found)


def sve_bits() -> int:
    """How many bits SVE's registers have in this process, says Linux; 0 without SVE. The processor may have
    more."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return 0
    found: int = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return (found & 0xFFFF) * 8 if found > 0 else 0


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    of_x86, of_arm = ("model name", "flags"), ("CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(of_x86 + of_arm)})).encode()
