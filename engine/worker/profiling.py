"""How much memory a step takes on a GPU: steps of nobody are run before the KV cache is allocated."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import torch

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.buckets import ROW_TOKENS, Buckets
from personae.engine.worker.prefill_graphs import sizes
from personae.engine.worker.runner import Runner
from personae.engine.worker.warm_up import Spans, rehearse_sampling
from personae.errors import AdapterError
from personae.kernels.memory import memory_of
from personae.lora.adapter import Adapter
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.source import AdapterSource


class GpuMemory(msgspec.Struct, frozen=True):
    """A GPU's memory in bytes: what a step takes at most, what is free besides the weights, and all."""

    step: int
    free: int
    total: int


def measured(device: torch.device, step: Callable[[], int]) -> GpuMemory:
    """The memory of the device; `step` measures what a step takes, and runs first."""
    taken = step()
    return GpuMemory(taken, *torch.cuda.mem_get_info(device))


def step_bytes(
    model: Decoder,
    shapes: LoraShapes,
    layout: MemoryLayout,
    kv_dtype: torch.dtype,
    *,
    ranks: int,
    max_adapters: int,
    graphs: bool,
) -> int:
    """The most bytes that torch reserves for a step of the layout, in addition to weights, KV cache and
    adapters; with `graphs`, and for captured steps.

    layout: its number of pages does not matter. ranks, max_adapters: of the adapters' pool. What libraries
    and compiled kernels take they have taken when this returns. Raises torch.OutOfMemoryError.
    """
    device = model.device
    one_page = replace(layout, num_pages=1, lendable=0, run=1)
    pool = LoraPool(
        shapes,
        capacity_rows=ranks,
        max_adapters=max_adapters,
        dtype=model.dtype,
        device=device,
        memory=memory_of(device, 0),
    )
    kv = KVCache(model.config.kv_specs, one_page, kv_dtype, device, memory=memory_of(device, 0))
    before = _settled(device)
    runner = Runner(model, kv, one_page, pool, _no_adapter)
    own = _settled(device) - before
    eager = max(_peak(runner, spans) for spans in largest(layout))
    if not graphs:
        return own + eager
    # Graphs share one pool. The memory of one kind is too fragmented for the other to use all of it.
    captured = sum(_peak(runner, spans) for spans in _captured(layout))
    return own + eager + captured + _kept(model, shapes, layout)


def largest(layout: MemoryLayout) -> Iterator[Spans]:
    """The steps that take the most memory: of as many tokens as there may be in as few sequences, and of as
    many sequences, each as long as it may be."""
    longest = layout.max_model_len
    whole, rest = divmod(layout.max_batch_tokens, longest)
    yield ([(0, longest)] * whole + ([(0, rest)] if rest else []))[: layout.max_seqs]
    yield [(longest - 1, 1)] * layout.max_seqs


def _captured(layout: MemoryLayout) -> Iterator[Spans]:
    """As many tokens as the largest graphs have: without prompts, in contexts as long as they may be; with
    one."""
    tokens = Buckets(layout).most
    each = min(ROW_TOKENS, layout.max_model_len, -(-tokens // layout.max_seqs))
    yield [(layout.max_model_len - each, each)] * (tokens // each)
    whole, rest = divmod(sizes(layout.max_batch_tokens)[-1], layout.max_model_len)
    yield ([(0, layout.max_model_len)] * whole + ([(0, rest)] if rest else []))[: layout.max_seqs]


def _kept(model: Decoder, shapes: LoraShapes, layout: MemoryLayout) -> int:
    """The bytes that graphs keep between steps: the hidden rows of each, with and without adapters, and what
    attention reads and writes in those for prompts."""
    prompts = sizes(layout.max_batch_tokens)
    tokens = sum(bucket.tokens for bucket in Buckets(layout)) + sum(prompts)
    widest = max(site.inputs for site in shapes.sites.values())  # at least what the output projection reads
    return 2 * (tokens * model.config.hidden_size + prompts[-1] * widest) * model.dtype.itemsize


def _peak(runner: Runner, spans: Spans) -> int:
    """The bytes that torch reserves for a step, and for choosing its tokens."""
    before = _settled(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    logits = runner.rehearse(spans, everybody=True)
    rehearse_sampling(logits)
    del logits
    torch.cuda.synchronize(runner.device)
    return torch.cuda.max_memory_reserved(runner.device) - before


def _settled(device: torch.device) -> int:
    """The bytes that torch has reserved, without what nothing uses any more."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _no_adapter(digest: str, source: AdapterSource) -> Adapter:
    raise AdapterError(f"adapter {digest} is not read while memory is measured")
