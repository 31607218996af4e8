"""The Triton attention over latent vectors in the interpreter against the reference."""

import pytest
import torch
from paged import attention_batch
from torch import Tensor

from personae.kernels import reference, reference_latent
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.triton import latent_attention as host
from personae.kernels.triton.sizes import Gpu

CPU = torch.device("cpu")
GPU = Gpu(64, hopper=True)
LATENT, ROPE, PAGE = 40, 8, 16
# (tokens already in the cache, tokens of this step) of each row.
MIXES = {
    "decode": [(0, 1), (7, 1), (95, 1), (15, 1)],
    "decode in splits": [(300, 1), (20, 1), (63, 1)],
    "drafts behind a row, and a prompt": [(150, 3), (0, 64), (15, 1)],
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHORTEST_SPLIT", 64)


def case(rows: list[tuple[int, int]], heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, LatentPlan]:
    """Queries, a cache with NaN where no row has a token, and the plan."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-(start + count) // PAGE) for start, count in rows]
    pages = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    own = [(*row, table) for row, table in zip(rows, tables, strict=True)]
    batch = attention_batch(own, PAGE, CPU)
    cache = torch.full((sum(counts) + 3, 1, PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
    whole = attention_batch(
        [(0, sum(row), table) for row, table in zip(rows, tables, strict=True)], PAGE, CPU
    )
    kept = torch.randn(len(whole.write_index), 1, LATENT + ROPE, generator=generator).to(dtype)
    reference.append_latent(kept, cache, whole.write_index)
    q = torch.randn(int(batch.query_start[-1]), heads, LATENT + ROPE, generator=generator).to(dtype)
    return q, cache, LatentPlan(batch, LATENT, 32)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "dtype"), [(20, torch.float32), (4, torch.float16)], ids=str)
def test_it_equals_the_reference(mix: str, heads: int, dtype: torch.dtype) -> None:
    q, cache, plan = case(MIXES[mix], heads, dtype)
    found = host.latent_attention(q, cache, plan, 0.3, GPU)
    meant = reference_latent.latent_attention(q.float(), cache.float(), plan, 0.3)
    assert [prompt.number for prompt in plan.prompts] == ([1] if "prompt" in mix else [])
    for run in plan.runs:
        assert (found[run].float() - meant[run]).abs().max() < TOLERANCE[dtype]
