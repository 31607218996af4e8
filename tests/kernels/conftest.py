"""What several files of tests use."""

import ctypes

import pytest

from personae.kernels.cpu.compiler import built, find_compiler
from personae.kernels.cpu.prebuilt import VARIANTS, features_here

AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture(scope="session")
def skylake() -> ctypes.CDLL:
    """The CPU kernels for the first servers with AVX-512, from the cache folder if they are there."""
    if not features_here() >= AVX512:
        pytest.skip("this machine has no AVX-512")
    compiler = find_compiler()
    assert compiler
    return ctypes.CDLL(str(built(compiler, "-march=skylake-avx512")))


@pytest.fixture(scope="session")
def laptop() -> ctypes.CDLL:
    """The CPU kernels for processors with AVX2 and no AVX-512, from the cache folder if they are there."""
    compiler = find_compiler()
    assert compiler
    return ctypes.CDLL(str(built(compiler, *VARIANTS[0].flags)))
