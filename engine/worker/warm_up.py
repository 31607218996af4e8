"""Warm-up of a GPU before its first request: every kernel is compiled, every decode step is captured.

Triton compiles a kernel when it is launched with new constants or alignments. That takes about a second, and
a request would wait for it. So warm-up runs each shape of step that kernels are compiled for: contexts that
attention splits into twice as many parts, prompts that fill one more tile of queries, numbers of tokens for
which SGMV splits its sums in another way. Compiled kernels stay on disk, so the next start is quick.
"""

import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from personae.engine.plan import MemoryLayout
from personae.engine.worker.runner import Runner
from personae.kernels.masks import Scratch
from personae.kernels.operators import choose
from personae.kernels.sampling import SamplingRows

Spans = list[tuple[int, int]]
"""Rows of a step: the position of the first token, and the number of tokens."""

FEW = 64  # tokens of a prompt; tiles of queries grow with the prompt up to here

_log = logging.getLogger("personae.engine")


def warm_up(runner: Runner) -> None:
    """Run and capture what requests will need, before anything uses the cache or the adapters. Waits for the
    device, so that its errors appear here."""
    begun = time.monotonic()
    _log.info("compiling the GPU's kernels; the first start of a model on a machine takes about a minute")
    logits = torch.zeros(0)
    for spans in shapes(runner.layout):
        logits = runner.rehearse(spans)
    rehearse_sampling(logits[:1])
    for graphs in (runner.graphs, runner.prefill_graphs):
        if graphs is not None:
            graphs.capture_all()
    torch.cuda.synchronize(runner.device)
    _log.info("the GPU's kernels are ready after %.1f s", time.monotonic() - begun)


def rehearse_sampling(logits: torch.Tensor) -> None:
    """Choose tokens by every parameter that has a kernel. logits: [S, V], which stay as they are; [S, 0] on a
    rank of a later stage, which chooses none."""
    if not logits.shape[-1]:
        return
    count = len(logits)
    drawn = SamplingRows(
        np.ones(count, np.float32),
        np.full(count, 2),
        np.full(count, 0.5),
        np.zeros(count, np.float32),
        np.zeros(count, np.uint64),
        np.zeros(count, np.int64),
    )
    choose(logits.clone(), drawn, None, Scratch(logits.device))


def shapes(layout: MemoryLayout) -> Iterator[Spans]:
    """Steps that together launch every kernel in every form that a step of this layout may need."""
    longest, most = layout.max_model_len, layout.max_batch_tokens
    contexts = [1, *_doublings(257, longest, of=256), longest]
    for context in contexts:
        yield [(context - 1, 1)]
        few = min(FEW, context, most)
        yield [(context - few, few)]
    for count in _doublings(2, min(FEW, longest, most)):
        yield [(0, count)]
    for tokens in (*_doublings(2 * FEW, most), most):
        whole, rest = divmod(tokens, longest)
        spans = [(0, longest)] * whole + ([(0, rest)] if rest else [])
        yield spans[: layout.max_seqs]
    everybody = [(0, 1)] * layout.max_seqs
    yield everybody
    if most > layout.max_seqs and longest > 1:
        yield [(0, 2), *everybody[1:]]


def _doublings(first: int, last: int, of: int | None = None) -> Iterator[int]:
    """Numbers from `first` up to `last`. Each doubles the one before, or its part that is a multiple of
    `of`."""
    while first <= last:
        yield first
        first += first if of is None else first // of * of
