"""Compiles the C++ operators with the machine's own compiler.

A library that is compiled here is in the user's cache folder. Its name is a hash of the sources, the
compiler, the flags and the processor. So changed sources or another machine give another library, and a stale
one is never loaded.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from personae.kernels.cache_folder import cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "decoder.cpp"))
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)

_log = logging.getLogger("personae.kernels")


def find_compiler() -> str | None:
    """The path of the machine's C++ compiler, $CXX first."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def compile_library(compiler: str, to: Path, *flags: str) -> None:
    """Compiles the operators into a shared library, with `flags` after FLAGS. Raises OSError and
    subprocess.SubprocessError."""
    subprocess.run(  # noqa: S603  # the machine's own compiler
        [compiler, *FLAGS, *flags, "-o", str(to), *map(str, SOURCES)],
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
        [*sources, version, " ".join((*FLAGS, *flags)).encode(), *(() if flags else (_processor(),))]
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


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))})).encode()
