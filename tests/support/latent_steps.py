"""Steps over latent vectors, for the backends' attention over them."""

import torch
from paged import attention_batch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.latent_attention import LatentPlan

CPU = torch.device("cpu")
LATENT, ROPE, PAGE = 40, 8, 16
# (tokens already in the cache, tokens of this step) of each row.
MIXES = {
    "decode": [(0, 1), (7, 1), (95, 1), (15, 1)],
    "decode in splits": [(300, 1), (20, 1), (63, 1)],
    "drafts behind a row, and a prompt": [(150, 3), (0, 64), (15, 1)],
}


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
