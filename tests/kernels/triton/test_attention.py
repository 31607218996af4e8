"""The Triton attention in the interpreter against the reference: mixes of rows, heads, windows, splits."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from paged import attention_batch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.attention import AttentionBatch
from personae.kernels.triton import attention as host
from personae.kernels.triton import pointwise
from personae.kernels.triton.sizes import Gpu

CPU = torch.device("cpu")
GPU = Gpu(8, hopper=True)  # with two key/value heads up to four splits
# (tokens already in the cache, tokens of this step) of each row.
MIXES = {
    "one token": [(0, 1)],
    "decode": [(0, 1), (7, 1), (95, 1), (15, 1)],
    "decode in splits": [(300, 1), (20, 1), (63, 1), (64, 1), (129, 1)],
    "prefill": [(0, 5), (0, 23)],
    "chunked prefill in splits": [(140, 9), (70, 3)],
    "mixed": [(150, 1), (0, 23), (15, 1), (40, 2)],
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHORTEST_SPLIT", 64)


def case(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """q as a strided view, pages anywhere; what no row owns is NaN, page ids past a row's end are wild."""
    generator = torch.Generator().manual_seed(1)
    logit_mask = [-(-(start + count) // page_size) for start, count in rows]
    num_pages = sum(logit_mask) + 3
    pages = random.Random(2).sample(range(num_pages), sum(logit_mask))
    tables = [[pages.pop() for _ in range(count)] for count in logit_mask]
    batch = attention_batch([(*row, table) for row, table in zip(rows, tables, strict=True)], page_size, CPU)
    for row, count in enumerate(logit_mask):
        batch.page_table[row, count:] = 10**6
    caches = torch.full((2, num_pages, kv_heads, page_size, dim), torch.nan, dtype=dtype)
    whole = attention_batch(
        [(0, sum(row), table) for row, table in zip(rows, tables, strict=True)], page_size, CPU
    )
    keys, values = torch.randn(2, len(whole.write_index), kv_heads, dim, generator=generator).to(dtype)
    reference.append_kv(keys, values, caches[0], caches[1], whole.write_index)
    tokens = int(batch.query_start[-1])
    q = torch.randn(tokens, heads * dim + 16, generator=generator).to(dtype)[:, : heads * dim]
    return q.view(tokens, heads, dim), caches[0], caches[1], batch


def truth(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scale: float, window: int | None) -> Tensor:
    """The reference in float32; it wants valid page ids."""
    valid = AttentionBatch(
        batch.query_start,
        batch.kv_length,
        batch.page_table.clamp_max(len(k) - 1),
        batch.write_index,
        batch.max_query,
        batch.max_kv,
    )
    return reference.paged_attention(q.float(), k.float(), v.float(), valid, scale, window)


@pytest.mark.parametrize("mix", MIXES)
# float16 takes larger tiles than float32.
@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float32), (13, torch.float32), (90, torch.float16)], ids=str
)
def test_it_equals_the_reference(mix: str, window: int | None, dtype: torch.dtype) -> None:
    q, k, v, batch = case(MIXES[mix], 6, 2, 16, 16, dtype)
    found = host.TritonAttention(GPU)(q, k, v, batch, 0.3, window)
    expected = truth(q, k, v, batch, 0.3, window)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(4, 4, 16, 4), (9, 1, 24, 8), (20, 1, 32, 32)]
)
def test_every_shape_of_heads_and_pages_equals_the_reference(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> None:
    q, k, v, batch = case([(70, 1), (140, 3)], heads, kv_heads, dim, page_size, dtype)
    found = host.TritonAttention(GPU)(q, k, v, batch, dim**-0.5, None)
    assert found.dtype == dtype
    expected = truth(q, k, v, batch, dim**-0.5, None)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mix", ["decode in splits", "mixed"])
def test_a_cache_of_fp8_is_read_as_what_was_rounded(mix: str, dtype: torch.dtype) -> None:
    q, k, v, batch = case(MIXES[mix], 6, 2, 16, 16, dtype)
    k, v = (cache.to(reference.FP8) for cache in (k, v))
    found = host.TritonAttention(GPU)(q, k, v, batch, 0.3, None)
    assert found.dtype == dtype
    expected = truth(q, k, v, batch, 0.3, None)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_rows_bits_are_the_same_alone_and_in_any_company(window: int | None) -> None:
    rows = [(300, 1), (20, 1), (0, 1), (130, 1)]
    q, k, v, batch = case(rows, 4, 2, 16, 16, torch.float32)
    together = host.TritonAttention(GPU)(q, k, v, batch, 0.25, window)
    for row, (start, _) in enumerate(rows):
        table = batch.page_table[row, : start // 16 + 1].tolist()
        alone = attention_batch([(start, 1, table)], 16, CPU)
        one = host.TritonAttention(GPU)(q[row : row + 1], k, v, alone, 0.25, window)
        assert torch.equal(one[0], together[row])


def test_a_graphs_unused_rows_change_nothing_and_read_nothing() -> None:
    q, k, v, batch = case([(90, 1), (5, 1)], 4, 2, 16, 16, torch.float32)
    padded = AttentionBatch(
        torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        torch.tensor([91, 6, 0, 0], dtype=torch.int32),
        torch.full((4, batch.page_table.shape[1]), 10**6, dtype=torch.int32),
        batch.write_index,
        max_query=1,
        max_kv=512,
    )
    padded.page_table[:2] = batch.page_table
    found = host.TritonAttention(GPU)(q, k, v, padded, 0.25, None)
    torch.testing.assert_close(found, truth(q, k, v, batch, 0.25, None), atol=2e-6, rtol=1e-5)


def test_how_a_sequence_is_split_follows_from_its_length_and_the_device() -> None:
    assert host.most_splits_for(max_kv=64, kv_heads=8, processors=132) == 1
    assert host.most_splits_for(max_kv=128, kv_heads=8, processors=132) == 2
    assert host.most_splits_for(max_kv=10**5, kv_heads=8, processors=132) == 16
    assert host.most_splits_for(max_kv=10**5, kv_heads=200, processors=132) == 1


def test_pages_may_lie_further_away_than_32_bits_reach(tmp_path: Path) -> None:
    apart, pages = 2**30, 3  # page 2 begins at element 2**31; the file has holes and takes no room
    flat = torch.from_numpy(np.memmap(tmp_path / "cache", np.float16, "w+", shape=(2 * apart + 4096,)))
    shape, strides = (pages, 2, 16, 16), (apart, 256, 16, 1)
    k, v = (flat.as_strided(shape, strides, start) for start in (0, 2048))
    batch = attention_batch([(0, 5, [2])], 16, CPU)
    new_k, new_v, q = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    pointwise.append_kv(new_k, new_v, k, v, batch.write_index)
    found = host.TritonAttention(GPU)(q, k, v, batch, 0.25, None)
    near = torch.zeros(2, 1, 2, 16, 16, dtype=torch.float16)
    batch.page_table.zero_()
    reference.append_kv(new_k, new_v, near[0], near[1], batch.write_index - 32)
    expected = reference.paged_attention(q.float(), near[0].float(), near[1].float(), batch, 0.25)
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)
