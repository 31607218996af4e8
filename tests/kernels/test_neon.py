"""Products and steps of the decoder on ARM's NEON, under qemu: the bits of AVX2, for any number of rows."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from personae.kernels.cpu.compiler import find_compiler
from personae.kernels.cpu.prebuilt import features_here, fitting

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-O0", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-attributes")


def hashes(name: str, compiler: str, to: Path, *flags: str, under: tuple[str, ...] = ()) -> str:
    source = Path(__file__).with_name(name)
    subprocess.run(
        [compiler, *FLAGS, *flags, "-static", "-pthread", "-o", str(to), str(source)], check=True
    )  # a compiler
    run = subprocess.run([*under, str(to)], capture_output=True, text=True, check=False)  # what it made
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(QEMU), reason=f"no {CROSS} or no {QEMU}")
@pytest.mark.skipif(not fitting(features_here()), reason="no AVX2 to compare with")
@pytest.mark.parametrize(("source", "lines"), [("products.cpp", 14), ("steps.cpp", 4)])
def test_neon_has_the_bits_of_avx2_and_any_number_of_rows_gives_the_same(
    source: str, lines: int, tmp_path: Path
) -> None:
    here = find_compiler()
    assert here
    with ThreadPoolExecutor() as at_once:
        neon = at_once.submit(hashes, source, CROSS, tmp_path / "neon", under=(QEMU,))
        avx2 = at_once.submit(hashes, source, here, tmp_path / "avx2", "-march=x86-64-v3")
        assert len(set(neon.result().splitlines())) == lines
        assert neon.result() == avx2.result()
