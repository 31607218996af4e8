"""Cases of attention for the interpreter; see `cases.py`."""

import random
from typing import TypedDict, Unpack

import torch

from personae.kernels import reference
from personae.kernels.attention import AttentionBatch
from personae.kernels.triton.attention import TritonAttention
from personae.kernels.triton.sizes import Gpu, ceil_div
from ptx.cases import PAGE, TOLERANCE, Case, Check
from ptx.launches import unwritten, watched
from ptx.stages_attention import AttentionStages


class Given(TypedDict, total=False):
    """What a case of attention has instead of dice. rows: (queries, keys)."""

    dim: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    fp8: bool
    rows: list[tuple[int, int]]
    window: int | None
    processors: int


def attention(seed: int, capability: int, *, kind: str | None = None, **given: Unpack[Given]) -> Case:
    """kind: decode, small (some tokens a row), mixed (a prefill among them)."""
    dice = random.Random(seed)
    dim, kv_heads = dice.choice((64, 80, 96, 128)), dice.choice((1, 2))
    dim, kv_heads = given.get("dim", dim), given.get("kv_heads", kv_heads)
    heads = kv_heads * given.get("group", dice.choice((1, 2, 3, 4, 6, 7, 8)))
    kind = kind or dice.choice(("decode", "small", "mixed"))
    dtype = given.get("dtype", dice.choice((torch.bfloat16, torch.float16)))
    kept = reference.FP8 if capability >= 89 and given.get("fp8", dice.random() < 0.25) else dtype
    rows = []
    for _ in range(dice.randint(1, 4)):
        length = dice.choice((1, dice.randint(1, 40), dice.randint(200, 600)))
        most = {"decode": 1, "small": dice.randint(1, 6), "mixed": dice.choice((1, dice.randint(1, 60)))}[
            kind
        ]
        rows.append((min(length, most), length))
    rows = given.get("rows", rows)
    window = dice.choice((None, None, dice.randint(1, 300)))
    window = given.get("window", window)
    gpu = Gpu(given.get("processors", dice.choice((2, 8, 16, 132))), hopper=capability == 90)
    shape = f"{heads}/{kv_heads} heads of {dim}, {dtype} of {kept}, window {window}, {gpu}"
    text = f"attention {kind} {seed}: {rows}, {shape}"

    def run() -> list[Check]:
        torch.manual_seed(seed)
        batch, pages = _paged(rows, random.Random(seed))
        caches = unwritten(2, pages, kv_heads, PAGE, dim, dtype=kept)
        for row, (_, length) in enumerate(rows):
            at = torch.arange(length)
            page = batch.page_table[row].long()[at // PAGE]
            for cache in caches:
                cache[page, :, at % PAGE] = torch.randn(length, kv_heads, dim).to(dtype).to(kept)
        tokens = sum(count for count, _ in rows)
        q = unwritten(tokens, (heads + 2) * dim, dtype=dtype)[:, : heads * dim].view(tokens, heads, dim)
        q.copy_(torch.randn(q.shape))
        q[-1] *= 60  # with another number than the greatest score its exponentials overflow
        stages = AttentionStages(q, caches, batch, rows, window, TOLERANCE[dtype])
        with watched(stages.look):
            found = TritonAttention(gpu)(q, caches[0], caches[1], batch, dim**-0.5, window)
        known = AttentionBatch(
            batch.query_start,
            batch.kv_length,
            batch.page_table.clamp(0, pages - 1),
            batch.write_index,
            batch.max_query,
            batch.max_kv,
        )
        wide = (torch.nan_to_num(cache.float()) for cache in caches)
        truth = reference.paged_attention(q.float(), *wide, known, dim**-0.5, window)
        return [Check(found, truth, TOLERANCE[dtype]), *stages.checks]

    return Case(text, run)


def _paged(rows: list[tuple[int, int]], dice: random.Random) -> tuple[AttentionBatch, int]:
    """The batch of rows (queries, keys) on pages in any order, and how many pages there are. Page 0, which a
    kernel computes where it has none, is nobody's."""
    need = [ceil_div(length, PAGE) for _, length in rows]
    free = dice.sample(range(1, sum(need) + 4), sum(need) + 3)
    table = unwritten(len(rows), max(need) + dice.randint(0, 2), dtype=torch.int32)
    write = []
    for row, ((count, length), pages) in enumerate(zip(rows, need, strict=True)):
        table[row, :pages] = torch.tensor([free.pop() for _ in range(pages)])
        at = torch.arange(length - count, length)
        write.append(table[row].long()[at // PAGE] * PAGE + at % PAGE)
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    most, longest = (max(row[side] for row in rows) for side in (0, 1))
    return AttentionBatch(starts, lengths, table, torch.cat(write), most, longest), sum(need) + 4
