"""Products on ARM's NEON, under qemu: the bits of AVX2, for any number of rows."""

import shutil
import subprocess
from pathlib import Path

import pytest

from personae.kernels.cpu.build import find_compiler
from personae.kernels.cpu.prebuilt import features_here, fitting

CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-O1", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-attributes")


def hashes(compiler: str, to: Path, *flags: str, under: tuple[str, ...] = ()) -> str:
    source = Path(__file__).with_name("products.cpp")
    subprocess.run(
        [compiler, *FLAGS, *flags, "-static", "-pthread", "-o", str(to), str(source)], check=True
    )  # a compiler
    run = subprocess.run([*under, str(to)], capture_output=True, text=True, check=False)  # what it made
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(QEMU), reason=f"no {CROSS} or no {QEMU}")
@pytest.mark.skipif(not fitting(features_here()), reason="no AVX2 to compare with")
def test_products_have_the_bits_of_avx2_on_neon_and_any_number_of_rows_gives_the_same(tmp_path: Path) -> None:
    here = find_compiler()
    assert here
    found = hashes(CROSS, tmp_path / "neon", under=(QEMU,))
    assert len(set(found.splitlines())) == 8
    assert found == hashes(here, tmp_path / "avx2", "-march=x86-64-v3")
