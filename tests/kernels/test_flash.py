"""Attention by torch's variable-length attention, with a stand-in for FlashAttention 3."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from personae.engine.worker.buckets import ROW_TOKENS
from personae.errors import KernelError
from personae.kernels import flash, reference, registry
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import ReferenceAttention, attention_backend
from personae.kernels.flash import attention
from personae.kernels.flash.attention import FlashAttention
from personae.kernels.registry import Implementation, override

PAGE, DIM = 16, 32
calls: list[int] = []


def stand_in(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor,
    num_splits: int | None,
) -> Tensor:
    """What torch documents of the operator that FlashAttention 3 takes over. k: [pages, page, heads, D]."""
    assert (key_starts, alibi_slopes, dropout, return_debug_mask) == (None, None, 0.0, False)
    assert {x.dtype for x in (starts, seqused_k, block_table)} == {torch.int32}
    assert all(x.stride(-1) == 1 for x in (out, q, k, v, block_table))
    assert (num_splits, k.shape[1]) == (1, PAGE)
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    calls.append(len(seqused_k))
    for row, length in enumerate(seqused_k.tolist()):
        first, last = starts[row].item(), starts[row + 1].item()
        assert last - first <= max_q
        assert length <= max_k
        keys, values = (
            cache[block_table[row].long()]
            .flatten(0, 1)[:length]
            .repeat_interleave(q.shape[1] // k.shape[2], 1)
            for cache in (k, v)
        )
        scores = torch.einsum("thd,shd->hts", q[first:last].float(), keys.float()) * scale
        query = torch.arange(length - (last - first), length)[:, None]  # aligned at the end
        key = torch.arange(length)[None, :]
        seen = key <= query + window_size_right
        if window_size_left >= 0:
            seen &= key >= query - window_size_left
        scores = scores.masked_fill(~seen, float("-inf"))
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), values.float())
        out[first:last] = mixed.to(out.dtype)
    return torch.empty(q.shape[1], q.shape[0])


@pytest.fixture(scope="module", autouse=True)
def _stand_in() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward_no_dropout_inplace", stand_in, "CPU")
    yield
    library._destroy()


def case(rows: list[tuple[int, int]], heads: int, kv_heads: int) -> tuple[Tensor, Tensor, AttentionBatch]:
    """rows: (queries, keys), on pages in any order."""
    torch.manual_seed(len(rows))
    need = [-(-length // PAGE) for _, length in rows]
    free = random.Random(1).sample(range(sum(need) + 2), sum(need))
    table = torch.zeros(len(rows), max(need), dtype=torch.int32)
    for row, pages in enumerate(need):
        table[row, :pages] = torch.tensor([free.pop() for _ in range(pages)])
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    caches = torch.randn(2, sum(need) + 2, kv_heads, PAGE, DIM).bfloat16()
    tokens = sum(count for count, _ in rows)
    q = torch.randn(tokens, (heads + 2) * DIM).bfloat16()[:, : heads * DIM].view(tokens, heads, DIM)
    most, longest = (max(row[side] for row in rows) for side in (0, 1))
    return q, caches, AttentionBatch(starts, lengths, table, torch.zeros(tokens).long(), most, longest)


@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_prompts_equal_the_reference_with_windows_and_heads_that_share_keys(
    heads: int, kv_heads: int, window: int | None
) -> None:
    q, (k, v), batch = case([(40, 40), (1, 70), (33, 100), (2, 17)], heads, kv_heads)
    calls.clear()
    found = FlashAttention(ReferenceAttention())(q, k, v, batch, 0.2, window)
    assert calls == [4], "FlashAttention was not called"
    truth = reference.paged_attention(q.float(), k.float(), v.float(), batch, 0.2, window)
    torch.testing.assert_close(found.float(), truth, rtol=2e-2, atol=1e-2)


def test_steps_without_a_prompt_and_caches_in_fp8_go_to_the_other_kernels() -> None:
    others = ReferenceAttention()
    backend = FlashAttention(others)
    calls.clear()
    q, (k, v), batch = case([(1, 70), (ROW_TOKENS, 100)], 4, 2)
    assert torch.equal(backend(q, k, v, batch, 0.2), others(q, k, v, batch, 0.2))
    q, (k, v), batch = case([(40, 70)], 4, 2)
    k, v = k.to(reference.FP8), v.to(reference.FP8)
    assert torch.equal(backend(q, k, v, batch, 0.2), others(q, k, v, batch, 0.2))
    assert not calls
    assert attention.FEWEST > ROW_TOKENS, "graphs would capture it"


def test_torchs_function_takes_these_arguments_on_the_meta_device() -> None:
    q, caches, batch = case([(40, 70), (1, 3)], 6, 2)
    there = AttentionBatch(
        *(x.to("meta") for x in (batch.query_start, batch.kv_length, batch.page_table, batch.write_index)),
        batch.max_query,
        batch.max_kv,
    )
    k, v = caches.to("meta")
    plan = FlashAttention(ReferenceAttention()).plan(there, AttentionShape.of(q, k))
    out = plan(q.to("meta"), k, v, 0.2, None)
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)


def test_it_is_chosen_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, usual = FlashAttention(ReferenceAttention()), ReferenceAttention()
    found = {
        "triton": {"paged_attention": Implementation(usual)},
        "flash": {"paged_attention": Implementation(mine, flash.DTYPES, on_request=True)},
    }
    monkeypatch.setattr(registry, "operators", lambda backend: found.get(backend, {}))
    cuda = torch.device("cuda")
    assert attention_backend(cuda, torch.bfloat16) is usual
    with override(paged_attention="flash"):
        assert attention_backend(cuda, torch.bfloat16) is mine
        with pytest.raises(KernelError, match=r"flash does not take torch\.float32"):
            attention_backend(cuda, torch.float32)
    found["triton"] = {}
    assert isinstance(attention_backend(cuda, torch.bfloat16), ReferenceAttention)


@pytest.mark.parametrize(
    ("capability", "pages", "why"),
    [
        (None, True, "flash needs a CUDA device"),
        ((8, 0), True, r"flash needs a Hopper GPU \(compute capability 9\.x\)"),
        ((9, 0), False, "flash needs a torch whose .* has a block_table, which torch .* lacks"),
        ((9, 0), True, "flash needs FlashAttention 3, whose module flash_attn_interface is not installed"),
    ],
)
def test_a_request_is_refused_with_what_is_missing(
    capability: tuple[int, int] | None, pages: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if capability else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flash, "_reads_pages", lambda: pages)
    monkeypatch.setattr(
        registry, "operators", lambda backend: flash.operators() if backend == "flash" else {}
    )
    with override(paged_attention="flash"), pytest.raises(KernelError, match=why):
        attention_backend(torch.device("cuda"), torch.bfloat16)
