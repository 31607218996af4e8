"""Paged attention against torch's own attention, one row at a time, over gathered keys and values."""

import random

import pytest
import torch
from paged import PagedSequences, attention_batch
from tiny_models import model_folder
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from personae.engine.loader import load_model
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan, ReferenceAttention
from personae.kernels.operators import append_kv, paged_attention
from personae.kernels.reference import QUERY_BLOCK
from personae.kernels.registry import reference_only

CPU = torch.device("cpu")
# (tokens already in the cache, tokens of this step) of each row.
MIXES = {
    "one token": [(0, 1)],
    "one prompt": [(0, 37)],
    "decode": [(0, 1), (7, 1), (8, 1), (95, 1), (16, 1)],
    "prefill": [(0, 5), (0, 16), (0, 64)],
    "chunked prefill": [(30, 20), (16, 16), (1, 90)],
    "mixed": [(50, 1), (0, 33), (15, 1), (40, 9), (0, 1), (99, 2)],
    "more queries than a block": [(20, QUERY_BLOCK + 30), (5, 1)],
}
Case = tuple[Tensor, Tensor, Tensor, list[tuple[int, int, list[int]]]]


def case(rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page_size: int) -> Case:
    """q, k, v of all rows' whole sequences ([sum of lengths, heads, D]) and the rows with random pages."""
    generator = torch.Generator().manual_seed(1)
    total = sum(start + count for start, count in rows)
    q, k, v = (torch.randn(total, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    logit_mask = [-(-(start + count) // page_size) for start, count in rows]
    pages = random.Random(2).sample(range(sum(logit_mask) + 3), sum(logit_mask))
    tables = [[pages.pop() for _ in range(count)] for count in logit_mask]
    return q, k, v, [(*row, table) for row, table in zip(rows, tables, strict=True)]


def sequences(tensor: Tensor, rows: list[tuple[int, int, list[int]]]) -> list[Tensor]:
    return list(tensor.split([start + count for start, count, _ in rows]))


def truth(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float, window: int | None) -> Tensor:
    """Attention of the last `count` queries of one sequence; q, k, v: [length, heads, D]."""
    length, groups = len(q), q.shape[1] // k.shape[1]
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    out = scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen, scale=scale)
    return out.transpose(0, 1)[length - count :]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 32), (8, 1, 24)])
@pytest.mark.parametrize("window", [None, 1, 13, 64])
def test_it_is_attention_over_each_rows_own_tokens(
    mix: str, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    page_size, scale = 16, dim**-0.5
    q, k, v, rows = case(MIXES[mix], heads, kv_heads, dim, page_size)
    num_pages = 3 + sum(len(pages) for _, _, pages in rows)
    # What nobody has written is NaN: it must not enter the result.
    k_cache, v_cache = torch.full((2, num_pages, kv_heads, page_size, dim), torch.nan)
    whole = attention_batch([(0, start + count, pages) for start, count, pages in rows], page_size, CPU)
    step = attention_batch(rows, page_size, CPU)
    with reference_only():
        append_kv(k, v, k_cache, v_cache, whole.write_index)
        newest = [part[start:] for part, (start, _, _) in zip(sequences(q, rows), rows, strict=True)]
        found = paged_attention(torch.cat(newest), k_cache, v_cache, step, scale, window)
    expected = [
        truth(*parts, count, scale, window)
        for *parts, (_, count, _) in zip(*(sequences(x, rows) for x in (q, k, v)), rows, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    q, k, v, rows = case([(300, 1), (0, 50)], 4, 2, 32, 16)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    caches = torch.zeros(2, 30, 2, 16, 32, dtype=dtype)
    whole = attention_batch([(0, start + count, pages) for start, count, pages in rows], 16, CPU)
    newest = torch.cat([part[start:] for part, (start, _, _) in zip(sequences(q, rows), rows, strict=True)])
    step = attention_batch(rows, 16, CPU)
    with reference_only():
        append_kv(k, v, caches[0], caches[1], whole.write_index)
        found = paged_attention(newest, caches[0], caches[1], step, 0.2)
        wide = paged_attention(newest.float(), caches[0].float(), caches[1].float(), step, 0.2)
    assert found.dtype == dtype
    assert torch.equal(found, wide.to(dtype))


def test_append_writes_the_named_places_and_no_others() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 3, 2 * 8, generator=generator)  # k and v as strided parts of a merged output
    k, v = (qkv[:, part].view(5, 2, 8) for part in (1, 2))
    k_cache, v_cache = torch.zeros(2, 4, 2, 16, 8)
    places = [(3, 15), (0, 0), (2, 7), (3, 14), (1, 1)]
    with reference_only():
        append_kv(k, v, k_cache, v_cache, torch.tensor([page * 16 + offset for page, offset in places]))
    for token, (page, offset) in enumerate(places):
        assert torch.equal(k_cache[page, :, offset], k[token])
        assert torch.equal(v_cache[page, :, offset], v[token])
    assert k_cache.any(-1).sum() == v_cache.any(-1).sum() == len(places) * 2


def test_a_step_is_planned_once_for_layers_with_windows_of_their_own() -> None:
    class Counting(AttentionBackend):
        plans = 0

        def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
            self.plans += 1
            return ReferenceAttention().plan(batch, shape)

    decoder = load_model(model_folder("gemma3"), device=CPU, dtype="float32")
    chunks = {"a": list(range(5, 60)), "b": [8]}
    truth = PagedSequences(decoder).step(chunks)
    decoder._attention = counting = Counting()
    found = PagedSequences(decoder).step(chunks)
    assert counting.plans == 1
    for name, logits in truth.items():
        torch.testing.assert_close(found[name], logits, atol=1e-4, rtol=1e-4)
