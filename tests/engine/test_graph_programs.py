"""How many programs of attention a captured step launches, and how many of them have work."""

import os
from importlib.util import find_spec
from math import prod

import pytest
import torch

from personae.engine.plan import MemoryLayout
from personae.engine.worker.buckets import Buckets
from personae.kernels.attention import SHORTEST_SPLIT, AttentionBatch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton"
)
HEADS, KV_HEADS, DIM, LONGEST = 32, 8, 128, 131072
LAYOUT = MemoryLayout(8192, 16, 256, LONGEST, 4096)


def launched(rows: int, max_kv: int) -> list[int]:
    """Programs of the launches of one layer of a decode step, on a device of 132 multiprocessors."""
    from triton_aot import launches

    from personae.kernels.triton.attention import TritonAttention
    from personae.kernels.triton.sizes import Gpu

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    batch = AttentionBatch(ints(rows + 1), ints(rows), ints(rows, 8192), ints(rows), 1, max_kv)
    q = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, 8, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device="meta")
    with launches() as found:
        TritonAttention(Gpu(132, hopper=True))(q, k, v, batch, 0.1, None)
    return [prod(launch.grid) for launch in found]


@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize("context", [100, 256, 1000, 1024, 4096, 100_000])
def test_programs_without_work_are_few(rows: int, context: int) -> None:
    bucket = Buckets(LAYOUT).of(rows, 1, context)
    assert bucket is not None
    used = rows * KV_HEADS * min(16, -(-context // SHORTEST_SPLIT))
    attention, *merge = launched(rows, bucket.max_kv)
    assert attention == used, "none is without work at these contexts"
    assert len(merge) == (context > SHORTEST_SPLIT), "what has one part needs no merging"
    before = launched(rows, LONGEST)[0]
    assert before == rows * KV_HEADS * 16


def test_a_context_just_above_a_bound_has_the_most_programs_without_work() -> None:
    bucket = Buckets(LAYOUT).of(64, 1, 1025)
    assert bucket is not None
    assert launched(64, bucket.max_kv)[0] == 64 * KV_HEADS * 16  # of which 5 in 16 have work
