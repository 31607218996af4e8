"""CPU kernels that come compiled with a wheel, one library for each common set of instructions.

`make wheel` makes such a wheel, for x86 or for ARM. At start the richest set that the processor has is
chosen. Older processors and checkouts compile the kernels themselves (`build.py`).

    python -m personae.kernels.cpu.prebuilt DIR [NAME …]      # compiles all sets, or those that are named
"""

import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from personae.kernels.cpu.compiler import apple_features, built, find_compiler, sve_bits

FOLDER = Path(__file__).with_name("prebuilt")

_V3 = "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe popcnt sse4_1 sse4_2 ssse3 xsave"  # as in cpuinfo
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
_VNNI = f"{_V4} avx512_vnni"
_BF16 = f"{_VNNI} avx512_bf16"
_FP16 = f"{_BF16} avx512_fp16"
_ARCHITECTURES = {"x86_64": "avx2", "aarch64": "asimd", "arm64": "asimd"}  # what each of its sets needs
# The machine's own may be older; macOS has its own in any case.
_STATIC = () if sys.platform == "darwin" else ("-static-libstdc++", "-static-libgcc")


class Variant(NamedTuple):
    """A set of instructions: the compiler's flags for it, and the processor's in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _variant(name: str, needs: str, *flags: str) -> Variant:
    return Variant(name, (*flags, *_STATIC), frozenset(needs.split()))


VARIANTS = (
    _variant("x86-64-v3", _V3, "-march=x86-64-v3"),
    _variant("avx-vnni", f"{_V3} avx_vnni", "-march=x86-64-v3", "-mavxvnni"),
    _variant("x86-64-v4", _V4, "-march=x86-64-v4"),
    _variant("avx512-vnni", _VNNI, "-march=x86-64-v4", "-mavx512vnni"),
    _variant("avx512-bf16", _BF16, "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    _variant("avx512-fp16", _FP16, "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512fp16"),
    _variant(
        "amx",
        f"{_FP16} amx_bf16 amx_int8 amx_tile",
        "-march=x86-64-v4",
        "-mavx512vnni",
        "-mavx512bf16",
        "-mavx512fp16",
        "-mamx-tile",
        "-mamx-bf16",
        "-mamx-int8",
    ),
    _variant("neon", "asimd", "-march=armv8-a"),
    _variant("neon-dotprod", "asimd asimddp", "-march=armv8.2-a+dotprod"),
    _variant("neon-i8mm", "asimd asimddp i8mm", "-march=armv8.2-a+dotprod+i8mm"),
    _variant(
        "sve256",
        "asimd asimddp i8mm sve svei8mm sve256",
        "-march=armv8.2-a+sve+dotprod+i8mm",
        "-msve-vector-bits=256",
    ),
    _variant("sve512", "asimd sve sve512", "-march=armv8.2-a+sve", "-msve-vector-bits=512"),
)
"""The poorest first, those of x86 before ARM's. Sets of SVE run on registers of just their length."""


def find(folder: Path = FOLDER, features: frozenset[str] | None = None) -> Path | None:
    """The library in `folder` for a processor with these features, this machine's by default; None if there
    is none for it."""
    variants = fitting(features_here() if features is None else features)
    paths = (folder / f"{variant.name}.so" for variant in variants)
    return next((path for path in paths if path.is_file()), None)


def fitting(features: frozenset[str]) -> list[Variant]:
    """The variants that a processor with these features can run, the richest first."""
    return [variant for variant in reversed(VARIANTS) if variant.needs <= features]


def features_here() -> frozenset[str]:
    """What Linux says that this processor has, of x86 or ARM, and macOS of ARM; nothing elsewhere. With SVE
    also its length: `sve256` for 256 bits."""
    if sys.platform == "darwin":
        return apple_features()
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # x86 and ARM
    found = flags.partition(":")[2].split()
    return frozenset([*found, f"sve{sve_bits()}"] if "sve" in found else found)


def make(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Compile this architecture's variants into `folder`, or those that are named. Raises OSError and
    subprocess.SubprocessError."""
    compiler = find_compiler()
    if compiler is None:
        raise OSError("there is no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    here, made = _ARCHITECTURES.get(platform.machine(), ""), []
    for variant in VARIANTS:
        if variant.name in names or (not names and here in variant.needs):
            shutil.copyfile(built(compiler, *variant.flags), to := folder / f"{variant.name}.so")
            made.append(to)
    return made


if __name__ == "__main__":
    for path in make(Path(sys.argv[1]), sys.argv[2:]):
        print(f"{path} {path.stat().st_size} bytes")  # noqa: T201
