"""The C++ operators against the torch reference, over shapes, dtypes, page layouts and popularity."""

import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE

from personae.kernels import reference
from personae.kernels.attention import AttentionBatch, kv_width
from personae.kernels.cpu import compiler as compiling
from personae.kernels.cpu import operators
from personae.kernels.cpu.build import library
from personae.kernels.cpu.compiler import compile_library, find_compiler
from personae.kernels.cpu.prebuilt import features_here
from personae.kernels.masks import Scratch
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
AVX512_BF16, AMX = "avx512_bf16", "amx_tile"  # as /proc/cpuinfo names them
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def cpu() -> dict:
    found = operators()
    assert found, "there is a compiler, so the operators must build"
    return {name: own.run for name, own in found.items()}


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    tolerance = 2e-2 if ours.dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance)


def attention_case(rows: list[tuple[int, int]], page_size: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """rows: (queries, kv length). Pages are scattered; everything that is not a row's own is NaN."""
    generator = torch.Generator().manual_seed(7)
    pages = [-(-length // page_size) for _, length in rows]
    num_pages = sum(pages) + 3
    shuffled = torch.randperm(num_pages, generator=generator).tolist()
    k_cache, v_cache = (
        torch.full((num_pages, kv_heads, page_size, dim), torch.nan, dtype=dtype) for _ in "kv"
    )
    table = torch.full((len(rows), max(pages)), shuffled[-1], dtype=torch.int32)
    for row, (_, length) in enumerate(rows):
        for page in range(pages[row]):
            table[row, page] = shuffled.pop()
        for at in range(length):
            where = int(table[row, at // page_size]), slice(None), at % page_size
            k_cache[where] = torch.randn(kv_heads, dim, generator=generator).to(dtype)
            v_cache[where] = torch.randn(kv_heads, dim, generator=generator).to(dtype)
    queries = torch.tensor([0] + [count for count, _ in rows]).cumsum(0)
    batch = AttentionBatch(
        query_start=queries.int(),
        kv_length=torch.tensor([length for _, length in rows], dtype=torch.int32),
        page_table=table,
        write_index=torch.zeros(int(queries[-1]), dtype=torch.int64),
        max_query=max(count for count, _ in rows),
        max_kv=max(length for _, length in rows),
    )
    return k_cache, v_cache, batch, generator


MIXED = [(1, 1), (1, 37), (5, 5), (1, 300), (40, 90), (1, 16), (33, 33), (1, 17)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim"), [(16, 9, 3, 64), (4, 4, 4, 16), (32, 8, 1, 24), (8, 6, 2, 128)]
)
def test_attention_equals_the_reference(cpu, dtype, window, page_size, heads, kv_heads, dim) -> None:
    k_cache, v_cache, batch, generator = attention_case(MIXED, page_size, kv_heads, dim, dtype)
    tokens = int(batch.query_start[-1])
    # A strided view, as it comes out of a merged q, k, v product.
    q = torch.randn(tokens, heads * dim + 32, generator=generator).to(dtype)[:, : heads * dim]
    q = q.view(tokens, heads, dim)
    ours = cpu["paged_attention"](q, k_cache, v_cache, batch, dim**-0.5, window)
    close(ours, reference.paged_attention(q, k_cache, v_cache, batch, dim**-0.5, window))


def test_a_query_attends_with_the_same_bits_alone_and_in_any_company(cpu) -> None:
    k_cache, v_cache, batch, generator = attention_case(MIXED, 16, 2, 64, torch.float32)
    q = torch.randn(int(batch.query_start[-1]), 6, 64, generator=generator)
    together = cpu["paged_attention"](q, k_cache, v_cache, batch, 0.125, None)
    for row, (count, length) in enumerate(MIXED):
        start = int(batch.query_start[row])
        for query in range(count):
            alone = AttentionBatch(
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                kv_length=torch.tensor([length - count + query + 1], dtype=torch.int32),
                page_table=batch.page_table[row : row + 1].contiguous(),
                write_index=batch.write_index[:1],
                max_query=1,
                max_kv=length,
            )
            one = cpu["paged_attention"](q[start + query : start + query + 1], k_cache, v_cache, alone, 0.125)
            assert torch.equal(one[0], together[start + query])


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_where_it_should_and_nowhere_else(cpu, dtype) -> None:
    caches = [torch.full((6, 3, 8, 16), torch.nan, dtype=dtype) for _ in range(4)]
    merged = torch.randn(5, 3 * 16 * 2 + 7).to(dtype)
    k, v = merged[:, :48].view(5, 3, 16), merged[:, 48:96].view(5, 3, 16)
    index = torch.tensor([0, 47, 9, 30, 8])
    cpu["append_kv"](k, v, caches[0], caches[1], index)
    reference.append_kv(k, v, caches[2], caches[3], index)
    for ours, truth in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)


POPULARITY = {
    "identical": [(0, 7, 2)],
    "distinct": [(i, 1, i) for i in range(6)],
    "skewed": [(0, 9, 3), (9, 1, 0), (10, 2, 5)],
    "uniform with base rows": [(2, 3, 1), (7, 3, 4)],
    "prefill": [(0, 40, 5), (40, 1, 0), (41, 30, 3)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, (96, 32, 32)), (40, (72,)), (576, (1536, 1536))])
def test_sgmv_equals_the_reference(cpu, dtype, popularity, inputs, outputs) -> None:
    generator = torch.Generator().manual_seed(3)
    segments = POPULARITY[popularity]
    ranks = [1, 8, 0, 16, 64, 5]
    pages = [-(-rank // RANK_PAGE) for rank in ranks]
    capacity = (sum(pages) + 2) * RANK_PAGE
    tables, weight_pools = [], []
    for out in outputs:
        free = torch.randperm(capacity // RANK_PAGE, generator=generator).tolist()
        table = torch.full((len(ranks), max(pages)), 10**6, dtype=torch.int32)
        for slot, count in enumerate(pages):
            table[slot, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        tables.append(RankTable(torch.tensor(ranks, dtype=torch.int32), table))
        weight_pools.append(
            WeightPool(
                (torch.randn(capacity, inputs, generator=generator) / inputs**0.5).to(dtype),
                torch.randn(capacity, out, generator=generator).to(dtype),
            )
        )
    tokens = max(first + count for first, count, _ in segments) + 2
    x = torch.randn(tokens, inputs + 8, generator=generator).to(dtype)[:, :inputs]
    merged = torch.randn(tokens, sum(outputs), generator=generator).to(dtype)
    ours, truth = merged.clone(), merged.clone()
    work = WorkList(*(torch.tensor(column, dtype=torch.int32) for column in zip(*segments, strict=True)))
    for operator, y in ((cpu["sgmv"], ours), (reference.sgmv, truth)):
        operator(x, torch.split(y, outputs, dim=1), tuple(weight_pools), tuple(tables), work)
    close(ours, truth)
    listed = torch.zeros(tokens, dtype=torch.bool)
    for first, count, slot in segments:
        listed[first : first + count] = ranks[slot] > 0
    assert torch.equal(ours[~listed], merged[~listed])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (130, 40), (9, 3, 64)])
def test_norms_equal_the_reference(cpu, dtype, shape) -> None:
    x = (torch.randn(*shape[:-1], shape[-1] + 8) * 3).to(dtype)[..., : shape[-1]]
    weight = torch.randn(shape[-1]).to(dtype)
    close(cpu["rms_norm"](x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    if len(shape) == 2:
        residual = torch.randn(shape).to(dtype)
        ours, truth = (op(x, residual, weight, 1e-5) for op in (cpu["add_rms_norm"], reference.add_rms_norm))
        close(ours[0], truth[0])
        assert torch.equal(ours[1], truth[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("turned", [32, 24])
def test_rotary_equals_the_reference_on_heads_and_on_parts_of_heads(cpu, dtype, tokens, turned) -> None:
    merged = torch.randn(tokens, 12 * 32).to(dtype)
    angles = torch.rand(100, turned // 2) * 6
    positions = torch.randint(0, 100, (tokens,))
    results = []
    for operator in (cpu["rotary"], reference.rotary):
        copy = merged.clone()
        q, k = copy[:, : 8 * 32].view(tokens, 8, 32), copy[:, 8 * 32 : 10 * 32].view(tokens, 2, 32)
        operator(q[..., :turned], k[..., :turned], positions, angles.cos(), angles.sin())
        results.append(copy)
    close(*results)
    assert torch.equal(results[0][:, 10 * 32 :], merged[:, 10 * 32 :])


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_equal_the_reference_at_every_magnitude(cpu, dtype, name) -> None:
    gate = torch.cat(
        [torch.linspace(-200, 200, 401), torch.tensor([0.0, 1e-8, -1e-8, 88.0, -88.0, 3e38, -3e38])]
    )
    x = torch.cat([gate, torch.ones_like(gate)]).repeat(3, 1).to(dtype)
    ours = cpu[name](x)
    assert torch.isfinite(ours[:, :401]).all()
    close(ours, getattr(reference, name)(x))


FILTERS = {
    "plain": (0, np.inf, 0.0),
    "top_k": (7, np.inf, 0.0),
    "top_p": (0, 0.7, 0.0),
    "min_p": (0, np.inf, 0.2),
    "all": (40, 0.9, 0.01),
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 80, 513, 4099])
def test_tokens_are_those_that_the_reference_chooses(cpu, vocab, filters) -> None:
    """But for edges closer than float32 can tell, of which these cases have none."""
    generator = torch.Generator().manual_seed(vocab)
    words = (vocab + 31) // 32
    masks = torch.randint(-(2**31), 2**31, (12, words + 2), generator=generator).to(torch.int32)[:, :words]
    masks[0], masks[1], masks[2, ::2], masks[8, 1:], masks[8, 0] = -1, 0, -1, 0, 1
    masks[3:6, 0] |= 1
    wide = 3 * torch.randn((12, vocab + 5), generator=generator)
    wide[3, 0], wide[4, 0], wide[5, 0] = torch.nan, torch.inf, -torch.inf
    wide[9] = 0.0  # a tie of all
    top_k, top_p, min_p = FILTERS[filters]
    rows = SamplingRows(
        np.where(np.arange(12) % 2, np.float32(0.8), np.float32(0)),
        np.full(12, top_k if top_k < vocab else 0, np.int64),
        np.full(12, top_p, np.float64),
        np.full(12, min_p, np.float32),
        np.arange(12, dtype=np.uint64) * np.uint64(2**61 + 12345),
        np.arange(12, dtype=np.int64),
    )
    scratch = Scratch(torch.device("cpu"))
    for mask in (masks, None):
        ours = wide.clone()
        tokens, best = cpu["choose"](ours[:, :vocab], rows, mask, scratch)
        torch.testing.assert_close(ours, wide, rtol=0, atol=0, equal_nan=True)
        wanted, most = reference.choose(wide.clone()[:, :vocab], rows, mask, scratch)
        found = torch.isfinite(most)
        assert torch.equal(tokens[found], wanted[found])
        assert torch.equal(best[found], most[found])
        assert not torch.isfinite(best[~found]).any()
        assert torch.equal(best.isneginf(), most.isneginf()), "nothing allowed is not the same as not finite"
        assert ((tokens >= 0) & (tokens < vocab)).all()


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processors are x86 ones")
def test_the_sources_compile_for_a_processor_with_bfloat16_and_no_amx(tmp_path: Path) -> None:
    """Those without AVX-512 have their own library: `laptop`, of which products and steps are asked. Where
    this machine is such a processor, its own library has been compiled for one."""
    if AVX512_BF16 in features_here() and AMX not in features_here():
        assert library() is not None
        return
    compiler = find_compiler()
    assert compiler
    compile_library(compiler, tmp_path / "kernels.so", "-O0", "-march=cooperlake")


def test_compiling_is_said_once_and_a_library_that_is_there_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_library", lambda compiler, to, *flags: to.write_bytes(b"library"))
    compiler = find_compiler()
    assert compiler is not None
    with caplog.at_level("INFO"):
        first, second = compiling.built(compiler), compiling.built(compiler)
    assert first == second
    assert caplog.messages == ["compiling CPU kernels (once, about a minute)"]


def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    begun = threading.Event()

    def compile_slowly(compiler: str, to: Path, *flags: str) -> None:
        begun.set()
        time.sleep(0.05)  # in which the other one comes, too
        compiled.append(to)
        to.write_bytes(b"library")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_library", compile_slowly)
    compiler = find_compiler()
    assert compiler is not None
    with ThreadPoolExecutor() as both:  # each with a lock of its own, as two processes have
        first = both.submit(compiling.built, compiler)
        assert begun.wait(PATIENCE)
        second = both.submit(compiling.built, compiler)
        assert first.result() == second.result()
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 24)])
def test_a_cache_in_int8_equals_the_references(cpu, dtype, heads, kv_heads, dim) -> None:
    *caches, batch, generator = attention_case(MIXED, 16, kv_heads, kv_width(dim, torch.int8), torch.float32)
    ours = [torch.full(cache.shape, -1, dtype=torch.int8) for cache in caches]  # -1: a scale that is NaN
    theirs = [cache.clone() for cache in ours]
    rows = zip(_places(batch), batch.kv_length, strict=True)
    places = torch.cat([row[: int(length)] for row, length in rows])
    k, v = (torch.randn(len(places), kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    k[3] = 0.0
    cpu["append_kv"](k, v, *ours, places)
    reference.append_kv(k, v, *theirs, places)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    kept = reference.dequantize_kv(ours[0].transpose(1, 2).flatten(0, 1)[places])
    assert float((kept - k).abs().amax() / k.abs().amax()) < 0.6 / 127
    q = torch.randn(int(batch.query_start[-1]), heads, dim, generator=generator).to(dtype)
    found = cpu["paged_attention"](q, *ours, batch, dim**-0.5, 40)
    close(found, reference.paged_attention(q, *ours, batch, dim**-0.5, 40))
    v[4, :, 0] = torch.inf
    cpu["append_kv"](k, v, *ours, places)
    assert not cpu["paged_attention"](q, *ours, batch, dim**-0.5, None).isfinite().all(), "an overflow shows"


def _places(batch: AttentionBatch) -> torch.Tensor:
    """Where the tokens of each row lie, [rows, tokens]."""
    pages = batch.page_table.long()
    return (pages.unsqueeze(-1) * 16 + torch.arange(16)).flatten(1)
