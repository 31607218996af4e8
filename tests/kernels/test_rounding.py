"""Floats become bfloat16 in the C++ kernels as IEEE 754 says, whichever instructions there are."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

from personae.kernels.cpu import operators
from personae.kernels.cpu.compiler import FLAGS, SOURCES, find_compiler
from personae.kernels.cpu.prebuilt import features_here

pytestmark = pytest.mark.skipif(
    "fuse" not in operators() or "avx512bw" not in features_here(),
    reason="no compiler, or no AVX-512 on this machine",
)
ROUNDING = """
#include "instructions.h"
extern "C" void round_all(const float* x, bf16* y, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) put(y + i, _mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16));
}
"""


@pytest.mark.parametrize("processor", ["native", "skylake-avx512"])
def test_floats_are_rounded_as_torch_does_and_subnormal_ones_to_zero(processor: str, tmp_path: Path) -> None:
    """With the instruction, where this processor has it, and without."""
    compiler, source, made = find_compiler(), tmp_path / "rounding.cpp", tmp_path / "rounding.so"
    assert compiler
    source.write_text(ROUNDING)
    headers = SOURCES[0].parent
    flags = [*FLAGS, f"-march={processor}", f"-I{headers}"]
    subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True, timeout=PATIENCE)
    upper = torch.arange(1 << 16).unsqueeze(1) << 16  # all there are
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (upper | lower).flatten().to(torch.uint32).view(torch.float32)
    found = torch.empty(x.shape, dtype=torch.bfloat16)
    ctypes.CDLL(str(made)).round_all(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(found.data_ptr()), ctypes.c_int64(len(x))
    )
    subnormal = x.abs() < torch.finfo(torch.float32).tiny
    truth = torch.where(subnormal, torch.zeros(()).copysign(x), x).bfloat16()
    assert torch.equal(found.view(torch.int16)[~x.isnan()], truth.view(torch.int16)[~x.isnan()])
    assert found[x.isnan()].isnan().all()
