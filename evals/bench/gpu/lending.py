"""Memory that the KV cache lends to adapters and gets back: do kernels and graphs still work, and how long
does it take?"""

import time
from collections.abc import Iterator
from dataclasses import replace
from math import nan

import torch

from personae.evals.bench.gpu.checks import Check
from personae.evals.bench.gpu.engine import LIMIT, Mix, Rig
from personae.evals.bench.gpu.timing import event_time
from personae.lora.segments import lora_batch

ROWS = 16
COPIES = 3  # copies of an adapter of rank 64; they only fit with lent memory
MIB = 1 << 20


def lending_checks(rig: Rig) -> Iterator[Check]:
    """Adapters are loaded into memory that the cache lends, then evicted, and the cache gets it back. All the
    time a graph that was captured before is replayed. rig: with memory that can be lent."""
    torch.cuda.synchronize()  # the adapters are there
    old: Mix = [0, 0, 5, 9, *[None] * (ROWS - 4)]
    lengths = [rig.config.max_position // 2] * ROWS
    step, twin = rig.step(old, lengths), rig.step([2] * ROWS, lengths)
    truth, theirs = step.eager().double(), twin.eager().double()

    def same(when: str) -> Check:
        found = step.replayed()
        error = nan if found is None else float((found.double() - truth).norm() / truth.norm())
        return Check(f"lending, a graph that was captured before, {when}", error, LIMIT)

    yield same("before")
    lent: list[int] = []
    digests = [f"copy {number}" for number in range(COPIES)]
    for digest in digests:
        adapter = replace(rig.adapters[2], digest=digest)
        lent += lend(rig, rig.pool.short_of(adapter), len(lent))
        slot = rig.pool.load(adapter)
        mine = lora_batch(rig.pool, [slot] * ROWS, [1] * ROWS)
        found = rig.model.forward(twin.tokens, twin.positions, rig.kv, twin.batch, mine).double()
        error = float((found - theirs).norm() / theirs.norm())
        yield Check(f"lending, an adapter in another place, {len(lent)} pages lent", error, LIMIT)
        yield same(f"{len(lent)} pages lent")
    yield Check("lending, nothing had to be lent", float(not lent), 0)
    for digest in digests:
        rig.pool.unload(digest)
    recall(rig, lent)
    back = rig.kv.data[:, :, min(lent) : rig.layout.num_pages]
    pattern = torch.arange(back.shape[2], device=rig.device).to(back.dtype)[:, None, None, None]
    back.copy_(pattern.expand_as(back))
    wrong = (back != pattern).sum()
    yield Check("lending, what is written to pages that came back", float(wrong), 0)
    yield same("all repaid")


def lend(rig: Rig, size: int, before: int) -> list[int]:
    """Lend adapters this many bytes, rounded up to runs, of the last pages that are not lent yet."""
    run = rig.layout.run
    count = -(-size // (run * rig.kv.page_bytes)) * run
    last = rig.layout.num_pages - before
    pages = list(range(last - count, last))
    torch.cuda.synchronize()
    for _ in rig.kv.unmapping(pages):
        pass
    rig.pool.budget += count * rig.kv.page_bytes
    return pages


def recall(rig: Rig, pages: list[int]) -> None:
    """The cache gets them back."""
    rig.pool.budget -= len(pages) * rig.kv.page_bytes
    for _ in rig.pool.unmapping():
        pass
    for _ in rig.kv.mapping(pages):
        pass


def lending_table(rig: Rig) -> Iterator[dict[str, object]]:
    """How long the driver's calls take on the host, for 128 MiB; and the decode step of the engine's table,
    whose cache is ordered by layer, with a cache that is ordered by page."""
    run = rig.layout.run
    runs = max(128 * MIB // (run * rig.kv.page_bytes), 1)
    pages = range(
        rig.layout.num_pages - min(runs * run, rig.layout.num_pages // 2 // run * run), rig.layout.num_pages
    )
    for turn in ("first", "again"):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in rig.kv.unmapping(pages):
            pass
        given = time.perf_counter()
        for _ in rig.kv.mapping(pages):
            pass
        done = time.perf_counter()
        size = len(pages) * rig.kv.page_bytes / MIB
        yield {"what": f"to give back, {turn}", "MiB": size, "us": (given - begun) * 1e6}
        yield {"what": f"to have back, {turn}", "MiB": size, "us": (done - given) * 1e6}
    step = rig.step(sorted(row % 16 for row in range(64)), [rig.config.max_position // 2] * 64)
    if step.replayed() is not None:
        yield {
            "what": "a decode step of 64 rows, 16 adapters, cache by pages",
            "us": event_time(step.replayed),
        }
