"""On other sets of instructions products and the decoder's steps have the bits of AVX2, for any rows.

ARM's sets run under qemu, AMX where the processor has it.
"""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from marks import long

from personae.kernels.cpu.compiler import find_compiler
from personae.kernels.cpu.prebuilt import VARIANTS, features_here, fitting

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
# -O1 compiles these templates in half the time of -O0, which writes every small function out, and the program
# is five times as fast under qemu. The others let GCC collect its garbage less often.
FAST = ("-O1", "--param=ggc-min-expand=300", "--param=ggc-min-heapsize=1000000")
FLAGS = (*FAST, "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-attributes")
FORMATS, STEPS = 14, 4  # the lines that the programs print
OF = {variant.name: variant for variant in VARIANTS}
SHORT = {("neon-i8mm", "products.cpp"), ("sve256", "steps.cpp")}
"""What `make test` compiles; each takes a core half a minute."""
CPU = {"sve256": "max,sve256=on", "sve512": "a64fx"}  # for qemu: of this length of registers

pytestmark = pytest.mark.skipif(not fitting(features_here()), reason="no AVX2 to compare with")


def hashes(
    source: str,
    compiler: str,
    to: Path,
    *flags: str,
    under: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
) -> list[str]:
    """The lines that the program prints, compiled with the flags."""
    path = Path(__file__).with_name(source)
    subprocess.run(
        [compiler, *FLAGS, *flags, "-static", "-pthread", "-o", str(to), str(path)], check=True
    )  # a compiler
    run = subprocess.run([*under, str(to), *given], capture_output=True, text=True, check=False)  # its output
    assert run.returncode == 0, run.stdout
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def of_avx2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Future[list[str]]]:
    """A program's lines with AVX2, which another thread computes."""
    compiler = find_compiler()
    assert compiler
    to, pool = tmp_path_factory.mktemp("avx2"), ThreadPoolExecutor()

    @cache
    def found(source: str) -> Future[list[str]]:
        return pool.submit(hashes, source, compiler, to / source.replace(".", "_"), *OF["x86-64-v3"].flags)

    return found


@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(QEMU), reason=f"no {CROSS} or no {QEMU}")
@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        (name, source, lines) if (name, source) in SHORT else long(name, source, lines)
        for name in ("neon", "neon-dotprod", "neon-i8mm", "sve256", "sve512")
        for source, lines in (("products.cpp", FORMATS), ("steps.cpp", STEPS))
    ],
)
def test_arm_has_the_bits_of_avx2_and_any_number_of_rows_gives_the_same(
    name: str,
    source: str,
    lines: int,
    of_avx2: Callable[[str], Future[list[str]]],
    tmp_path: Path,
) -> None:
    avx2 = of_avx2(source)
    arm = hashes(source, CROSS, tmp_path / "arm", *OF[name].flags, under=(QEMU, "-cpu", CPU.get(name, "max")))
    assert len(set(arm)) == lines
    assert arm == avx2.result()


@pytest.mark.skipif("amx" not in {fit.name for fit in fitting(features_here())}, reason="no AMX")
def test_tiles_have_the_bits_of_vectors_where_weights_have_few_bits(
    of_avx2: Callable[[str], Future[list[str]]], tmp_path: Path
) -> None:
    compiler, avx2 = find_compiler(), of_avx2("products.cpp")
    assert compiler
    tiles = hashes("products.cpp", compiler, tmp_path / "amx", *OF["amx"].flags, given=("tiles",))
    assert len(set(tiles)) == FORMATS
    assert tiles == avx2.result()
