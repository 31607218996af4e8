"""Chooses the sizes of the KV cache, a step and the adapter pool: as configured, or as memory allows."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch

from personae.actors.options import EngineOptions
from personae.engine.heads.head import Head
from personae.engine.kv import KVCache, pages_of_a_run
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.comm import ONE_RANK, Comm
from personae.engine.parallel.messages import PoolSizes
from personae.engine.parallel.ranks import Ranks
from personae.engine.plan import MemoryLayout
from personae.engine.worker.profiling import GpuMemory, measured, step_bytes
from personae.errors import LoadError
from personae.kernels.cgroup import free_memory, main_memory
from personae.kernels.memory import granule_of
from personae.kernels.reference import FP8
from personae.kernels.sgmv import RANK_PAGE
from personae.kernels.sizes import size_text
from personae.kernels.triton import FP8_CAPABILITY
from personae.lora.adapter import Adapter
from personae.lora.shapes import LoraShapes
from personae.lora.weight_pools import adapter_bytes, pool_bytes

PAGE_SIZE = 16  # tokens, if no layer has a state
LARGEST_PAGE = 512  # tokens, with states
HOST_KV_BYTES = 2 * 2**30  # by default; half of the memory if that is less
SPARE_RANKS = 128  # room for adapters that are added later, by default

_log = logging.getLogger("personae.engine")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The chosen sizes. `layout` has those of the KV cache and of a step.

    A page of the cache has `page_bytes`, in `kv_dtype`. The adapter pool has `ranks` rank rows per module, in
    `pool_bytes` of its own, and room for `spare_ranks` more in memory that the cache lends. With a pipeline,
    bytes are those of one rank of each stage together.
    """

    layout: MemoryLayout
    kv_dtype: torch.dtype
    page_bytes: int
    ranks: int
    spare_ranks: int
    pool_bytes: int

    @property
    def of_a_rank(self) -> PoolSizes:
        """The sizes as the ranks get them."""
        return _of_a_rank(self.layout, self.kv_dtype, self.ranks, self.spare_ranks)

    @property
    def max_adapters(self) -> int:
        """How many adapters fit at most, if all have the smallest rank."""
        return self.of_a_rank.max_adapters


def _of_a_rank(layout: MemoryLayout, kv_dtype: torch.dtype, ranks: int, spare: int) -> PoolSizes:
    name = str(kv_dtype).removeprefix("torch.")
    return PoolSizes(layout, name, ranks, spare, max((ranks + spare) // RANK_PAGE, 1))


def choose_sizes(
    options: EngineOptions,
    model: Decoder,
    shapes: LoraShapes,
    adapters: Collection[Adapter],
    draft: Decoder | Head | None = None,
    *,
    device: torch.device,
    loaded: bool = True,
    others: Ranks | None = None,
) -> Sizes:
    """Choose the sizes for a model on its device and the adapters that it serves from the start. `shapes`:
    see `shared_shapes`. A page of
    the cache has a part for the model and one for the `draft` model or head. `loaded`: the device has the
    weights. If not, a GPU's memory for a step is not measured, and what the weights need is left free.
    `others`: the other ranks of the model. On GPUs all measure their own, and the one with the least room
    decides.

    Raises LoadError, with the option to change, if the memory is too small.
    """
    kv_dtype = _kv_dtype(options, model, device)
    page_size = _page_size(model, kv_dtype)
    page_bytes = KVCache.bytes_per_page(model.shared.kv_specs, page_size, kv_dtype)
    draft_bytes = 0 if draft is None else _draft_bytes(draft, page_size)
    ranks = _ranks(options, adapters, shapes, model.dtype, model.comm.size)
    granule = granule_of(device)
    comm, on_gpu = model.comm, device.type == "cuda"
    fixed = comm.attention_ranks or (on_gpu and comm.size * comm.stages > 1)
    lent = None if fixed else granule  # ranks have other pages, and the same adapters
    own = pool_bytes(shapes, ranks, model.dtype, granule or 0)
    # Adapters may have as much again in addition to their ranks: see LoraPool.
    reserved = own + pool_bytes(shapes, ranks, model.dtype)
    measure = partial(_measured, options, model, shapes, kv_dtype, ranks, others)
    if not loaded:
        measure = partial(_without_weights, model, device)
    layout = _layout(
        options, model, device, kv_dtype, page_size, page_bytes, draft_bytes, reserved, lent, measure
    )
    spare = _spare_ranks(shapes, model.dtype, ranks, layout.lendable * page_bytes)
    return Sizes(layout, kv_dtype, page_bytes, ranks, spare, own)


def _page_size(model: Decoder, kv_dtype: torch.dtype) -> int:
    """The tokens of a page: with states as many as take as much memory as a page's states do, at most
    `LARGEST_PAGE`."""
    specs = [spec for spec in model.shared.kv_specs if spec is not None]
    if not any(spec.state for spec in specs):
        return PAGE_SIZE
    size, kept = PAGE_SIZE, sum(spec.bytes(kv_dtype) for spec in specs if not spec.state)
    while size < LARGEST_PAGE and KVCache.bytes_per_page(specs, size, kv_dtype) > 2 * size * kept:
        size *= 2
    return size


def _draft_bytes(draft: Decoder | Head, page_size: int) -> int:
    """A page's part for what guesses: keys and values, and the hidden states that a head reads."""
    if isinstance(draft, Head):
        states = page_size * draft.hidden_size * draft.dtype.itemsize
        return KVCache.bytes_per_page(draft.kv_specs, page_size, draft.dtype) + states
    return KVCache.bytes_per_page(draft.config.kv_specs, page_size, draft.dtype)


def _layout(
    options: EngineOptions,
    model: Decoder,
    device: torch.device,
    kv_dtype: torch.dtype,
    page_size: int,
    page_bytes: int,
    draft_bytes: int,
    reserved: int,
    granule: int | None,
    measure: Callable[[MemoryLayout], list[GpuMemory]],
) -> MemoryLayout:
    """Choose what fits next to `reserved` bytes of adapters. A page has `page_bytes` of the model, which can
    be lent, and `draft_bytes` of the draft model. `granule`: see `granule_of`. `measure`: the GPUs of all
    ranks, and what a step of a layout takes there."""
    on_cpu = device.type == "cpu"
    max_seqs = options.max_seqs or (64 if on_cpu else 256)
    largest = MemoryLayout(
        num_pages=0,
        page_size=page_size,
        whole=page_size > PAGE_SIZE,
        max_seqs=max_seqs,
        max_model_len=min(options.max_model_len or model.config.max_position, model.config.max_position),
        max_batch_tokens=max(options.max_batch_tokens or (512 if on_cpu else 4096), max_seqs),
    )
    if on_cpu:
        memory, source = _host_memory(options)
    else:
        memory, source = _device_memory(options, reserved, model.comm, measure(largest))
    regions = model.comm.attention_ranks or 1
    # All ranks that have pages share a machine's memory. Each has a GPU's to itself.
    whole_page = (page_bytes + draft_bytes) * (model.comm.attention_ranks or model.comm.size)
    if not on_cpu:
        whole_page = _page_of_a_stage(model, page_bytes, page_size, kv_dtype) + draft_bytes
    num_pages = memory // whole_page
    length = _longest(
        options.max_model_len, model.config.max_position, num_pages, page_size, whole_page, source
    )
    run, lendable = 1, 0
    if granule is not None:
        run = pages_of_a_run(page_bytes, granule)
        whole = num_pages // run * run
        lendable = max(min(whole // 2, whole - -(-length // page_size)) // run * run, 0)
        if lendable:
            num_pages = whole
    return replace(
        largest,
        num_pages=num_pages * regions,
        regions=regions,
        max_model_len=length,
        lendable=lendable,
        run=run if lendable else 1,
    )


def _host_memory(options: EngineOptions) -> tuple[int, str]:
    """The bytes of the KV cache on a CPU, and the source of that number for messages."""
    asked = (options.kv_memory or 0) + (options.adapter_memory or 0)
    installed, free = main_memory(), free_memory()
    if installed is not None and asked > installed:
        raise LoadError(
            f"--kv-memory and --adapter-memory ask for {size_text(asked, needed=True)}; "
            f"this machine or container has {size_text(installed)}."
        )
    if free is not None and asked > free:
        sizes = size_text(asked, needed=True), size_text(free)
        _log.warning("--kv-memory and --adapter-memory ask for %s; %s are free now", *sizes)
    default = HOST_KV_BYTES if installed is None else min(HOST_KV_BYTES, installed // 2 // options.share)
    return options.kv_memory or default, "--kv-memory"


def _page_of_a_stage(model: Decoder, page_bytes: int, page_size: int, kv_dtype: torch.dtype) -> int:
    """What a page takes on a rank, of `page_bytes` in all stages: in the stage where it takes the most."""
    stages = model.comm.stages
    if stages == 1:
        return page_bytes
    specs = [model.shared.of_stage(stage, stages).kv_specs for stage in range(stages)]
    return max(KVCache.bytes_per_page(each, page_size, kv_dtype) for each in specs)


def _device_memory(
    options: EngineOptions, reserved: int, comm: Comm, found: list[GpuMemory]
) -> tuple[int, str]:
    """The bytes of the KV cache on each GPU, and the source of that number for messages. `found`: the GPU of
    each rank. The rank with the least room for pages decides. Raises LoadError."""
    having_pages = comm.attention_ranks or comm.size
    if 0 < comm.attention_ranks < comm.size:
        found, others = found[:having_pages], found[having_pages:]
        least = min(others, key=lambda gpu: gpu.free - gpu.step)
        if reserved > least.free - least.step:
            raise LoadError(
                f"A GPU without attention has {size_text(least.free)} free besides the weights: too little "
                f"for a step ({size_text(least.step, needed=True)}) and up to "
                f"{size_text(reserved, needed=True)} of adapters (twice --adapter-memory)."
            )

    def unused(gpu: GpuMemory) -> int:
        return int(gpu.total * (1 - options.gpu_memory_utilization))

    if options.kv_memory:
        free = min(gpu.free for gpu in found)
        memory, source = options.kv_memory // (having_pages * comm.stages), "--kv-memory"
    else:
        least = min(found, key=lambda gpu: gpu.free - unused(gpu) - gpu.step)
        free, step = least.free, least.step
        memory = max(free - unused(least) - step - reserved, 0)
        source = (
            f"The GPU ({size_text(max(free - unused(least), 0))} of --gpu-memory-utilization "
            f"{options.gpu_memory_utilization:g} free besides the weights, {size_text(step, needed=True)} "
            "of them for a step)"
        )
    if memory + reserved > free:
        raise LoadError(
            f"The GPU has {size_text(free)} free besides the weights: too little for "
            f"{size_text(memory, needed=True)} of KV cache (--kv-memory) and up to "
            f"{size_text(reserved, needed=True)} of adapters (twice --adapter-memory)."
        )
    return memory, source


def _measured(
    options: EngineOptions,
    model: Decoder,
    shapes: LoraShapes,
    kv_dtype: torch.dtype,
    ranks: int,
    others: Ranks | None,
    layout: MemoryLayout,
) -> list[GpuMemory]:
    """The GPU of each rank. What a step takes is measured only if it decides."""
    if options.kv_memory:
        own, sizes = partial(measured, model.device, lambda: 0), None
    else:
        step = partial(_step_bytes, options, model, shapes, kv_dtype, ranks, layout)
        own, sizes = partial(measured, model.device, step), _of_a_rank(layout, kv_dtype, ranks, 0)
    return [own()] if others is None else others.measured(sizes, own)


def _without_weights(model: Decoder, device: torch.device, _layout: MemoryLayout) -> list[GpuMemory]:
    """The GPU, with what the weights take that are not loaded yet."""
    return [measured(device, lambda: model.nbytes)]


def _step_bytes(
    options: EngineOptions,
    model: Decoder,
    shapes: LoraShapes,
    kv_dtype: torch.dtype,
    ranks: int,
    layout: MemoryLayout,
) -> int:
    """What a step takes, measured. Raises LoadError if not even one fits."""
    free, _ = torch.cuda.mem_get_info()
    try:
        return step_bytes(
            model,
            shapes,
            layout,
            kv_dtype,
            ranks=ranks,
            max_adapters=max(ranks // RANK_PAGE, 1),
            graphs=options.cuda_graphs and model.capturable and model.comm is ONE_RANK,
        )
    except torch.OutOfMemoryError:
        raise LoadError(
            f"The GPU has {size_text(free)} free besides the weights: too little for a step of "
            f"{layout.max_batch_tokens} tokens (--max-batch-tokens) and {layout.max_seqs} sequences "
            "(--max-seqs)."
        ) from None


def _longest(
    asked: int | None, max_position: int, num_pages: int, page_size: int, page_bytes: int, source: str
) -> int:
    """The number of tokens of the longest sequence: as configured, else as many as the model supports and the
    cache holds."""
    if asked is not None and asked > max_position:
        raise LoadError(f"--max-model-len {asked} is more than the model's own {max_position} tokens.")
    held = num_pages * page_size
    longest = min(max_position, held)
    length = asked or longest
    if length > longest or not num_pages:
        needed = max(length, page_size)
        raise LoadError(
            f"{source} holds {held} tokens; a context of {needed} (--max-model-len) "
            f"needs {size_text(-(-needed // page_size) * page_bytes, needed=True)}."
        )
    return length


def check_kv_dtype(choice: str, device: torch.device) -> None:
    """Raises LoadError if the device keeps no keys and values in this dtype of `--kv-cache-dtype`."""
    if choice == "int8" and device.type != "cpu":
        raise LoadError("--kv-cache-dtype int8 needs a CPU; a GPU has fp8.")
    if choice == "fp8" and (device.type == "cpu" or torch.cuda.get_device_capability() < FP8_CAPABILITY):
        raise LoadError("--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper).")


def _kv_dtype(options: EngineOptions, model: Decoder, device: torch.device) -> torch.dtype:
    """The dtype of keys and values."""
    check_kv_dtype(options.kv_cache_dtype, device)
    if options.kv_cache_dtype == "auto":
        return model.dtype
    if any(spec is not None and not spec.values for spec in model.shared.kv_specs):
        raise LoadError(
            f"--kv-cache-dtype {options.kv_cache_dtype} does not work for models with convolutions or states."
        )
    return torch.int8 if options.kv_cache_dtype == "int8" else FP8


def _ranks(
    options: EngineOptions,
    adapters: Collection[Adapter],
    shapes: LoraShapes,
    dtype: torch.dtype,
    sharing: int,
) -> int:
    """The number of ranks per module in the pool: as configured, else those of the known adapters and some to
    spare."""
    own_bytes = pool_bytes(shapes, RANK_PAGE, dtype)
    page_bytes = own_bytes * sharing
    pages = [
        max(
            -(-adapter.rank // RANK_PAGE),
            -(-adapter_bytes(shapes, adapter.ranks, dtype.itemsize) // own_bytes) if adapter.experts else 0,
        )
        for adapter in adapters
    ]
    if options.adapter_memory is None:
        return sum(pages) * RANK_PAGE + SPARE_RANKS
    needed = max(pages, default=1)
    if options.adapter_memory // page_bytes < needed:
        least = size_text(needed * page_bytes, needed=True)
        raise LoadError(f"--adapter-memory must be at least {least} for these adapters.")
    return options.adapter_memory // page_bytes * RANK_PAGE


def _spare_ranks(shapes: LoraShapes, dtype: torch.dtype, ranks: int, lendable: int) -> int:
    """Places in addition to those in the pool's own memory: enough to use all memory that may be lent, if the
    narrowest module gets it. Empty places take no memory."""
    if not lendable:
        return 0
    memory = pool_bytes(shapes, ranks, dtype) + lendable
    page_bytes = shapes.layers * RANK_PAGE * min(map(sum, shapes.shared.values())) * dtype.itemsize
    return memory // page_bytes * RANK_PAGE - ranks
