"""Every Triton kernel, compiled ahead of time for Ampere and Hopper at the shapes of Llama 3.1 8B.

What can be known without a GPU: it compiles, no register is spilled, products run on tensor cores (HMMA;
HGMMA where the tile is large enough for Hopper's), and loads are 16 bytes wide.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from personae.kernels.sgmv import Arena, RankTable, WorkList

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
CAPABILITIES = (80, 90)
GROUPS = {"qkv": (4096, (4096, 1024, 1024)), "down": (14336, (4096,))}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces 3.10's default
@pytest.mark.parametrize(
    ("group", "tokens", "capability"),
    [("qkv", 64, 80), ("qkv", 64, 90), ("down", 64, 90), ("qkv", 2048, 80), ("qkv", 2048, 90)],
)
def test_sgmv_runs_on_tensor_cores_without_spills(
    group: str, tokens: int, capability: int, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.sgmv import sgmv

    inputs, outputs = GROUPS[group]
    arenas = tuple(Arena(meta(4096, inputs), meta(4096, out)) for out in outputs)
    tables = tuple(RankTable(ints(64), ints(64, 32)) for _ in outputs)
    ys = meta(tokens, sum(outputs)).split(list(outputs), dim=1)
    with launches() as found:
        sgmv(meta(tokens, inputs), ys, arenas, tables, WorkList(ints(64), ints(64), ints(64)), 528)
    plan, shrink, expand = (compiled(launch, capability, tmp_path) for launch in found)
    for machine in (plan, shrink, expand):
        print(tokens, group, capability, machine)
        assert machine.stack == machine.spills == 0
    product = "HGMMA" if capability == 90 and tokens > 64 else "HMMA"
    for machine in (shrink, expand):
        assert machine.instructions[product]
        assert machine.wide_loads >= 8
        assert machine.registers <= (128 if tokens <= 64 else 255)  # 128: four programs on a multiprocessor
