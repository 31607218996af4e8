"""From options to a script: loads the model and the adapters, decides the sizes, says how Back is built."""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from personae.actors.client import ModelCard
from personae.actors.script import Script
from personae.engine.background import Tiers
from personae.engine.base_weights import DecoderWeights
from personae.engine.config import GenerationDefaults, read_generation_defaults
from personae.engine.fairness import VirtualTokenCounters
from personae.engine.graphs import CudaCapture, DecodeGraphs
from personae.engine.jump import Spelling
from personae.engine.kv import KVCache, pages_of_a_run
from personae.engine.loader import EMBEDDING, OUTPUT, load_model
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.runner import Runner
from personae.engine.sampler import Sampler
from personae.engine.scheduler import Scheduler
from personae.engine.step import StepEngine
from personae.engine.tokens import Tokenizer
from personae.engine.warm_up import warm_up
from personae.errors import AdapterError, DriverError, LoadError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.vocabulary import Vocabulary
from personae.kernels.branch import Branch
from personae.kernels.container import free_memory, keep_to_share
from personae.kernels.memory import Memory, granule_of, main_memory, memory_of, warn_of_fixed_shares
from personae.kernels.quantized import Quantization
from personae.kernels.reference import FP8
from personae.kernels.sgmv import RANK_PAGE
from personae.kernels.triton import FP8_CAPABILITY
from personae.lora.adapter import Adapter, LoraShapes
from personae.lora.arenas import pool_bytes
from personae.lora.bounds import AdapterBounds
from personae.lora.copies import SideStream, pinned
from personae.lora.library import AdapterLibrary
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.stacking import stacked
from personae.lora.stored import KINDS
from personae.lora.writing import made_ready

PAGE_SIZE = 16  # tokens
DEVICE_SHARE = 0.85  # of the free device memory goes to the KV cache, unless told otherwise
HOST_KV_BYTES = 2 * 2**30  # or half of a smaller memory, unless told otherwise
SPARE_RANKS = 128  # room for adapters that come later, unless told otherwise
HOST_ADAPTER_BYTES = 2 * 2**30  # of adapters that are kept on the host beside those on the device

_log = logging.getLogger("personae.engine")

Progress = Callable[[int, int], None]


class EngineOptions(msgspec.Struct, frozen=True):
    """Everything that opening an engine needs; None means that the engine chooses.

    `model` is a Hugging Face model folder. Each sub-folder of each folder in `adapters` is an adapter,
    known by its folder's name; those that come later lie in `adapter_store`, by digest. `kv_cache_dtype`:
    "fp8" keeps keys and values in half the memory. `kv_memory` and `adapter_memory` are in bytes, the other
    sizes are in tokens or sequences; `background_tokens` is what batches may have of a step beside other
    requests. `secret` is what the tenants' prefix-cache salts are derived from. `cuda_graphs`: on a GPU
    decode steps are captured as graphs (`engine/graphs.py`). `quantize`: how the base's weights
    are kept, None for as `dtype` says.
    """

    model: Path
    adapters: tuple[Path, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_seqs: int | None = None
    kv_memory: int | None = None
    adapter_memory: int | None = None
    adapter_store: Path | None = None
    served_model_name: str | None = None
    secret: bytes | None = None
    background_tokens: int | None = None
    cuda_graphs: bool = True
    quantize: Quantization | None = None


@dataclass(frozen=True, slots=True)
class Assembly:
    """A script ready to be staged, and what the API wants to know of the model besides."""

    script: Script
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str  # for the log: where it runs, and its sizes


def assemble(options: EngineOptions, on_progress: Progress | None = None, *, warm: bool = False) -> Assembly:
    """Load everything that lives as long as the process. Blocks for as long as the weights take.

    `warm`: each engine also begins what only some requests need, so that the first of them need not wait:
    the process in which grammars are compiled.

    Raises ModelLoadError, AdapterError or LoadError with what is wrong and where.
    """
    device = _device(options.device)
    if options.quantize is not None and device.type != "cpu":
        raise LoadError(f"--quantize {options.quantize} is served on a CPU only; use --device cpu.")
    if device.type == "cpu":
        keep_to_share()
    model = _loaded(options, device, on_progress)
    config, kv_dtype = model.config, _kv_dtype(options, model)
    tokenizer = Tokenizer.load(options.model)
    defaults = read_generation_defaults(options.model, config.vocab_size)
    shapes = lora_shapes(model)
    folders = {folder.name: folder for folder in _adapter_folders(options.adapters)}
    named = {name: _adapter(folder, shapes) for name, folder in folders.items()}
    base = options.served_model_name or options.model.resolve().name
    if base in named:
        raise LoadError(f"The base model and an adapter are both called {base!r}; use --served-model-name.")
    capacity = _adapter_ranks(options, named.values(), shapes, model.dtype)
    granule = granule_of(device)
    # Beside their ranks adapters may have as much again: see LoraPool.
    own = pool_bytes(shapes, capacity, model.dtype, granule or 0)
    layout = _layout(options, model, own + pool_bytes(shapes, capacity, model.dtype), granule)
    page_bytes = KVCache.bytes_per_page(config, PAGE_SIZE, kv_dtype)
    lendable = layout.lendable * page_bytes
    spare = _spare_ranks(shapes, model.dtype, capacity, lendable)
    max_adapters = max((capacity + spare) // RANK_PAGE, 1)
    known = {adapter.digest: folders[name] for name, adapter in named.items()}
    on_gpu = device.type == "cuda"
    prepare = (
        partial(made_ready, dtype=model.dtype, host=pinned)
        if on_gpu
        else partial(stacked, layers=shapes.layers, dtype=model.dtype)
    )
    stored = None if on_gpu else KINDS[model.dtype]
    library = AdapterLibrary(shapes, known, options.adapter_store, HOST_ADAPTER_BYTES, prepare, stored)
    for adapter in named.values():
        library.put(prepare(adapter))
    vocabulary = Vocabulary.from_tokenizer_json(
        (options.model / "tokenizer.json").read_bytes(), config.vocab_size, tokenizer.eos_ids
    )
    spelling = Spelling(tokenizer, vocabulary.tokens)

    def build_step_engine() -> StepEngine:
        if on_gpu and layout.lendable:
            try:
                return engine_in(memory_of(device, (layout.num_pages + 1) * page_bytes + own), spare)
            except DriverError as error:
                warn_of_fixed_shares(error)
        return engine_in(memory_of(device, 0), 0 if on_gpu else spare)

    def engine_in(memory: Memory, spare_rows: int) -> StepEngine:
        sampler = Sampler(layout.max_seqs, config.vocab_size, device)
        pool = LoraPool(
            shapes,
            capacity_rows=capacity,
            max_adapters=max_adapters,
            dtype=model.dtype,
            device=device,
            base=DecoderWeights(model),
            spare_rows=spare_rows,
            copies=SideStream() if on_gpu else None,
            memory=memory,
        )
        captures = on_gpu and options.cuda_graphs
        kv = KVCache(config, layout, kv_dtype, device, spare=captures, memory=memory)
        graphs = DecodeGraphs(model, kv, pool, layout, CudaCapture(), Branch()) if captures else None
        runner = Runner(model, kv, layout, pool, sampler.last_tokens, graphs)
        if on_gpu:
            warm_up(runner)
        return StepEngine(runner, sampler, spelling)

    def build_compiler() -> GrammarCompiler:
        compiler = GrammarCompiler(vocabulary)
        if warm:
            compiler.warm_up()
        return compiler

    secret = options.secret or secrets.token_bytes(32)
    script = Script(
        build_step_engine=build_step_engine,
        build_scheduler=lambda: Scheduler(
            layout,
            Tiers(VirtualTokenCounters(), VirtualTokenCounters()),
            options.background_tokens,
            sharing=True,
        ),
        build_compiler=build_compiler,
        layout=layout,
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
        models=_cards(base, options, named),
        library=library,
        salt=lambda tenant: hmac.digest(secret, tenant.encode(), hashlib.sha256),
        late=not on_gpu,
    )
    bounds = AdapterBounds.of_pool(shapes, capacity, model.dtype, stored)
    about = (
        f"{device}, {options.quantize or str(model.dtype).removeprefix('torch.')}, "
        f"context {layout.max_model_len} tokens, KV cache {layout.num_pages * layout.page_size} tokens, "
        f"{layout.max_seqs} sequences and {layout.max_batch_tokens} tokens a step"
    )
    return Assembly(script, defaults, max_adapters, bounds, about)


def lora_shapes(model: Decoder) -> LoraShapes:
    """What an adapter of this model has to fit."""
    config = model.config
    embedding = model.fingerprints[EMBEDDING]
    copies = {"embedding": embedding, "output": model.fingerprints.get(OUTPUT, embedding)}
    return LoraShapes(
        config.layers,
        config.linear_shapes,
        (config.vocab_size, config.hidden_size),
        config.tie,
        copies,
        config.merged,
    )


def _device(choice: str) -> torch.device:
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        raise LoadError("No CUDA device is available; use --device cpu.")
    return torch.device(choice)


def _loaded(options: EngineOptions, device: torch.device, on_progress: Progress | None) -> Decoder:
    """The model on the device. Raises ModelLoadError, or LoadError when a GPU has too little memory for
    it."""
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    try:
        return load_model(
            options.model,
            device=device,
            dtype=options.dtype,
            quantize=options.quantize,
            max_position=options.max_model_len,
            on_progress=on_progress,
        )
    except torch.OutOfMemoryError:
        raise LoadError(
            f"The weights of {options.model} do not fit into the {free} bytes that are free on the GPU."
        ) from None


def _layout(options: EngineOptions, model: Decoder, reserved: int, granule: int | None) -> MemoryLayout:
    """The sizes that fit: what was asked for, else what the model and the memory without `reserved` bytes
    allow. `granule`: see `granule_of`."""
    on_cpu = model.device.type == "cpu"
    source = "--kv-memory"
    if on_cpu:
        asked = (options.kv_memory or 0) + (options.adapter_memory or 0)
        there = main_memory()
        if there is not None and asked > there:
            raise LoadError(
                f"--kv-memory and --adapter-memory ask for {asked} bytes; "
                f"this machine or container has {there}."
            )
        free = free_memory()
        if free is not None and asked > free:
            _log.warning("--kv-memory and --adapter-memory ask for %d bytes; %d are free now", asked, free)
        memory = options.kv_memory or (HOST_KV_BYTES if there is None else min(HOST_KV_BYTES, there // 2))
    else:
        free, _ = torch.cuda.mem_get_info()
        memory = options.kv_memory or max(int((free - reserved) * DEVICE_SHARE), 0)
        if memory + reserved > free:
            raise LoadError(
                f"The GPU has {free} bytes free beside the weights: too little for {memory} of KV cache "
                f"(--kv-memory) and up to {reserved} of adapters (twice --adapter-memory)."
            )
        if not options.kv_memory:
            source = f"The GPU ({free} bytes free beside the weights)"
    page_bytes = KVCache.bytes_per_page(model.config, PAGE_SIZE, _kv_dtype(options, model))
    num_pages = memory // page_bytes
    longest = min(model.config.max_position, num_pages * PAGE_SIZE)
    wanted = options.max_model_len or longest
    if wanted > model.config.max_position:
        raise LoadError(
            f"--max-model-len {wanted} is more than the model's own {model.config.max_position} tokens."
        )
    if wanted > longest or longest < PAGE_SIZE:
        needed = max(wanted, PAGE_SIZE)
        raise LoadError(
            f"{source} holds {num_pages * PAGE_SIZE} tokens; a context of {needed} (--max-model-len) "
            f"needs {-(-needed // PAGE_SIZE) * page_bytes} bytes."
        )
    max_seqs = options.max_seqs or (64 if on_cpu else 256)
    run, lendable = 1, 0
    if granule is not None:
        run = pages_of_a_run(page_bytes, granule)
        whole = num_pages // run * run
        lendable = max(min(whole // 2, whole - -(-wanted // PAGE_SIZE)) // run * run, 0)
        if lendable:
            num_pages = whole
    return MemoryLayout(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_seqs=max_seqs,
        max_model_len=wanted,
        max_batch_tokens=max(options.max_batch_tokens or (512 if on_cpu else 4096), max_seqs),
        lendable=lendable,
        run=run if lendable else 1,
    )


def _kv_dtype(options: EngineOptions, model: Decoder) -> torch.dtype:
    """What keys and values are kept as."""
    if options.kv_cache_dtype == "auto":
        return model.dtype
    if model.device.type == "cpu" or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise LoadError("--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper).")
    return FP8


def _adapter_ranks(
    options: EngineOptions, adapters: Collection[Adapter], shapes: LoraShapes, dtype: torch.dtype
) -> int:
    """How many ranks a module has in the pool: what was asked for, else those of the adapters that are there
    and some to spare."""
    page_bytes = pool_bytes(shapes, RANK_PAGE, dtype)
    if options.adapter_memory is None:
        return sum(map(_pages, adapters)) * RANK_PAGE + SPARE_RANKS
    pages = options.adapter_memory // page_bytes
    needed = max(map(_pages, adapters), default=1)
    if pages < needed:
        raise LoadError(f"--adapter-memory must be at least {needed * page_bytes} bytes for these adapters.")
    return pages * RANK_PAGE


def _spare_ranks(shapes: LoraShapes, dtype: torch.dtype, capacity: int, lendable: int) -> int:
    """Places beside those of the pool's own memory: enough for all memory that there may be, if the narrowest
    module has it. Those that stay empty take none."""
    if not lendable:
        return 0
    memory = pool_bytes(shapes, capacity, dtype) + lendable
    page_bytes = shapes.layers * RANK_PAGE * min(map(sum, shapes.modules.values())) * dtype.itemsize
    return memory // page_bytes * RANK_PAGE - capacity


def _adapter_folders(roots: tuple[Path, ...]) -> list[Path]:
    found: dict[str, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise LoadError(f"--adapters {root}: there is no such folder.")
        folders = sorted(path for path in root.iterdir() if (path / "adapter_config.json").is_file())
        if not folders:
            hint = " It is an adapter itself: name the folder that it lies in."
            alone = (root / "adapter_config.json").is_file()
            raise LoadError(
                f"--adapters {root}: no sub-folder has an adapter_config.json.{hint if alone else ''}"
            )
        for folder in folders:
            if folder.name in found:
                raise LoadError(
                    f"Two adapters are called {folder.name!r}: {found[folder.name]} and {folder}."
                )
            found[folder.name] = folder
    return list(found.values())


def _adapter(folder: Path, shapes: LoraShapes) -> Adapter:
    """Read one. Raises AdapterError that says which, since there may be many."""
    try:
        return read_adapter(folder, shapes)
    except AdapterError as error:
        raise AdapterError(f"adapter {folder}: {error.message}") from error


def _pages(adapter: Adapter) -> int:
    return -(-adapter.rank // RANK_PAGE)


def _cards(base: str, options: EngineOptions, adapters: dict[str, Adapter]) -> dict[str, ModelCard]:
    created = int(os.stat(options.model / "config.json").st_mtime)
    cards = {base: ModelCard(base, None, created, quantization=options.quantize)}
    for name, adapter in adapters.items():
        cards[name] = ModelCard(
            name, adapter.digest, created, base, adapter.rank, adapter.traits(), adapter.invocation
        )
    return cards
