"""Loads the model and the adapters that the options name, and specifies how the engine core is built from
them."""

import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from personae.actors.adapter_folders import adapter_folders
from personae.actors.client import ModelCard
from personae.actors.cluster.stage_machines import gather
from personae.actors.compiler_builder import CompilerBuilder
from personae.actors.draft_model import chosen_speculation, load_draft_model
from personae.actors.kit.gc_tuning import spare_what_is_here
from personae.actors.model_texts import ModelTexts
from personae.actors.options import EngineOptions
from personae.actors.page_storage import open_page_storage
from personae.actors.rank_cores import shared_cores
from personae.actors.rank_options import (
    attention_ranks,
    dist_library,
    expert_groups,
    two_batches,
)
from personae.actors.sizing import Sizes, check_kv_dtype, choose_sizes
from personae.actors.spec import EngineSpec, StepRunner
from personae.actors.start_adapters import KeptAdapters, read_start_adapters
from personae.engine.base_weights import DecoderBaseWeights
from personae.engine.checkpoints import open_checkpoint
from personae.engine.checkpoints.base import Checkpoint
from personae.engine.generation_config import GenerationDefaults
from personae.engine.heads.head import Head
from personae.engine.heads.states import HeadStates
from personae.engine.kv import KVCache
from personae.engine.loader import is_out_of_memory, load_model
from personae.engine.lora_shapes import lora_shapes, rank_shapes, shared_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.numerics import NumericsClass, weights_digest
from personae.engine.packed_weights import PackedWeights
from personae.engine.page_file import PageFile
from personae.engine.parallel.comm import ONE_RANK, Comm
from personae.engine.parallel.process import preparation
from personae.engine.parallel.ranks import Ranks
from personae.engine.pipelined import PipelinedEngine
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.speculation.batch_proposer import BatchProposer
from personae.engine.speculation.draft_model import DraftModel
from personae.engine.speculation.forced import Retokenizer
from personae.engine.speculation.head_proposer import HeadProposer
from personae.engine.speculation.policy import Always, Measured
from personae.engine.speculation.speculator import Propose, Speculator, expected_text, own_text
from personae.engine.speculation.step import SpeculativeStepEngine
from personae.engine.speculation.tenant_answers import TenantAnswers
from personae.engine.stats import MAX_DRAFTS
from personae.engine.step import StepEngine
from personae.engine.tiers.tier import Tier
from personae.engine.tiers.transfer import PageSource
from personae.engine.worker.adapters import ReadAdapter
from personae.engine.worker.capture import CudaCapture
from personae.engine.worker.graphs import DecodeGraphs
from personae.engine.worker.group import as_one
from personae.engine.worker.prefill_graphs import PrefillGraphs
from personae.engine.worker.runner import Runner
from personae.engine.worker.warm_up import warm_up
from personae.errors import DriverError, LoadError
from personae.kernels.cache_folder import cache_folder
from personae.kernels.cgroup import keep_to_share
from personae.kernels.memory import Memory, memory_of, warn_of_fixed_shares
from personae.kernels.registry import operators
from personae.kernels.side_stream import SideStream
from personae.kernels.sizes import size_text
from personae.kernels.triton import FP8_CAPABILITY, check_launcher
from personae.lora.adapter import Adapter
from personae.lora.bounds import AdapterBounds
from personae.lora.copies import StreamCopies
from personae.lora.fit import bounds_of_pool
from personae.lora.library import AdapterFetcher, AdapterLibrary
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.stored import KINDS
from personae.lora.throttle import no_rest

log = logging.getLogger("personae.engine")
HOST_ADAPTER_BYTES = 2 * 2**30  # for adapters kept on the host, in addition to those on the device
PACKED_BYTES = 20 * 2**30

Progress = Callable[[str, int, int], None]  # phase, bytes that are done, all bytes; see engine_process.py


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine spec that is ready to run, and what the API needs to know about the model."""

    engine_spec: EngineSpec
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str  # for the log: where it runs, and its sizes
    numerics: NumericsClass


def assemble(
    options: EngineOptions,
    on_progress: Progress | None = None,
    *,
    warm: bool = False,
    fetcher: AdapterFetcher | None = None,
    wait: Callable[[], None] | None = None,
) -> Assembly:
    """Load everything that lives as long as the process. Blocks until the weights are loaded.

    `warm`: this is a process for an engine, whose frontend has checked the tokenizer (`check_vocabulary`). It
    starts what only some requests need (what grammars need) once it serves. `fetcher` fetches adapters that
    are not on this machine. `wait` is called when everything is loaded that two engines may have at the same
    time, and returns when the other engine has ended.

    Raises ModelLoadError, AdapterError or LoadError with the problem and where it is.
    """
    device = chosen_device(options.device)
    _check_quantization(options.quantize, device)
    check_kv_dtype(options.kv_cache_dtype, device)
    phase = _no_progress if on_progress is None else on_progress
    phase("kernels", 0, 0)
    if device.type == "cpu":
        keep_to_share()
        operators("cpu")
    else:
        _check_kernels()
    phase("weights", 0, 0)
    checkpoint = open_checkpoint(options.model)
    vocab_size = checkpoint.config().vocab_size
    ranks = _other_ranks(options, checkpoint, device, partial(phase, "machines"))
    packed = _packed_weights(options, device, waits=wait is not None)
    comm = ONE_RANK if ranks is None else ranks.comm
    model = _loaded(options, device, partial(phase, "weights"), comm, packed, checkpoint)
    if ranks is not None:
        ranks.loaded()
    if comm.two_batches is not None and model.runs_in_one_call:
        raise LoadError(
            "--enable-two-batch-overlap: all layers of this model run in one call here, so a step has no "
            "halves; leave the option out, or give ranks attention of their own (--enable-dp-attention)."
        )
    texts = ModelTexts(checkpoint, vocab_size)
    if not warm:
        phase("tokenizer", 0, 0)
        texts.vocabulary()
    phase("adapters", 0, 0)
    speculate = chosen_speculation(options, device)
    draft = load_draft_model(options, model, texts.tokenizer, device, packed)
    shapes = lora_shapes(model)
    folders = adapter_folders(options.adapters, options.named_adapters)
    stored = KINDS[model.dtype] if device.type == "cpu" and ranks is None else None
    kept = None
    if stored is not None and packed is not None:
        kept = KeptAdapters(cache_folder() / "stacks", shapes, stored)
    adapters = read_start_adapters(folders, shapes, kept)
    cards = _cards(options, checkpoint, adapters, model.quantization)
    known = {adapter.digest: folders[name] for name, adapter in adapters.items()}
    prepare = preparation(model)
    library = AdapterLibrary(
        shapes,
        known,
        options.adapter_store,
        HOST_ADAPTER_BYTES,
        prepare,
        stored,
        fetcher,
        None if kept is None else kept.folders,
    )
    for adapter in adapters.values():
        if adapter.stored is None:
            library.put(prepare(adapter, rest=no_rest))
    compilers = CompilerBuilder(texts.vocabulary, warm)
    digest = weights_digest(options.model)
    defaults = checkpoint.generation_defaults(vocab_size)
    if wait is not None:
        compilers.build_ahead()
        spare_what_is_here()
        wait()
        if packed is not None:
            packed.settle()
    sizes = choose_sizes(
        options, model, shared_shapes(model), adapters.values(), draft, device=device, others=ranks
    )
    layout = sizes.layout
    phase("warm-up", 0, 0)
    numerics = NumericsClass(
        digest,
        str(model.dtype).removeprefix("torch."),
        model.quantization,
        str(sizes.kv_dtype).removeprefix("torch."),
        _instructions(device, options),
    )
    pages = open_page_storage(options, model, sizes, draft, numerics, ranks=ranks)
    tier = pages.tier
    stages = options.pipeline_parallel_size

    def build_scheduler() -> Scheduler:
        if tier is not None:
            tier.forget_fetches()
        return Scheduler(
            layout,
            VirtualTokenCounters(),
            options.background_tokens,
            background_policy=VirtualTokenCounters(),
            sharing=True,
            drafts=0 if speculate == "off" else MAX_DRAFTS,
            tier=tier,
            micro_batches=stages,
            ledger=None if pages.page_file is None else pages.page_file.ledger,
        )

    bounds = bounds_of_pool(shapes, sizes.ranks, model.dtype, stored, sizes.max_adapters)
    if kept is not None:
        kept.write_later(bounds)
    engine_spec = EngineSpec(
        build_step_engine=EngineBuilder(
            model,
            rank_shapes(model),
            sizes,
            texts.retokenizer,
            options.cuda_graphs,
            library.take,
            speculate,
            texts.spaceless,
            options.lora_side_stream,
            draft,
            tier,
            ranks,
            pages.source,
            pages.page_file,
        ).build,
        build_scheduler=build_scheduler,
        build_compiler=compilers.build,
        layout=layout,
        vocab_size=vocab_size,
        tokenizer=texts.tokenizer,
        models=cards,
        library=library,
        salt=options.salts(),
        late=device.type == "cpu" and stages == 1,
        steps_at_once=stages,
        build_kv_events=KVEventRecorder if options.record_kv_events else None,
        tier=tier,
        page_source=pages.source,
    )
    return Assembly(
        engine_spec,
        defaults,
        sizes.max_adapters,
        bounds,
        f"{device}{'' if ranks is None else f', {ranks.count} ranks'}, "
        f"{model.quantization or str(model.dtype).removeprefix('torch.')}, "
        f"{model.weight_bytes / 2**20:.0f} MiB of weights, "
        f"context {layout.max_model_len} tokens, "
        f"KV cache {layout.num_pages * layout.page_size} tokens, "
        f"{layout.max_seqs} sequences and {layout.max_batch_tokens} tokens a step",
        numerics,
    )


def loads_ahead(options: EngineOptions) -> bool:
    """Whether two engine cores of a machine may have the model loaded: on a CPU, by one rank. A GPU has no
    memory for that. Raises LoadError."""
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    return ranks == 1 and chosen_device(options.device).type == "cpu"


def _instructions(device: torch.device, options: EngineOptions) -> str:
    """The processor's instruction set or the kind of GPU, the version of torch, and how ranks share the
    model."""
    return " ".join(
        [
            _processor(device),
            *(
                f"{name} {size}"
                for name, size in (
                    ("tensor-parallel", options.tensor_parallel_size),
                    ("dp-attention", attention_ranks(options)),
                    ("expert-parallel", options.expert_parallel_size),
                    ("pipeline-parallel", options.pipeline_parallel_size),
                )
                if size > 1
            ),
            *(["gloo"] if options.dist_backend == "gloo" else []),  # ranks then run layer by layer
        ]
    )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm_{major}{minor} torch {torch.__version__}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Builds the step engine for each epoch of the engine core, around the one model. `graphs`: decode steps
    are captured on a GPU. `retokenizer` and `spaceless`: see `ModelTexts`. `speculate`: which drafts to use,
    see `--speculate`. `read_adapter` reads an adapter to the host. `side_stream`: see `--lora-side-stream`.
    `draft`: the model or the head of `--draft-model`. `tier` and `source`: see `EngineSpec`. `ranks`: the
    other ranks of the model. `page_file`: has the KV cache, if that outlives the engine."""

    model: Decoder
    shapes: LoraShapes
    sizes: Sizes
    retokenizer: Callable[[], Retokenizer]
    graphs: bool
    read_adapter: ReadAdapter
    speculate: str = "off"
    spaceless: Callable[[], Sequence[int] | None] = lambda: None
    side_stream: bool = False
    draft: Decoder | Head | None = None
    tier: Tier | None = None
    ranks: Ranks | None = None
    source: PageSource | None = None
    page_file: PageFile | None = None

    def build(self) -> StepRunner[Any, Any, Any]:
        """Build a step engine. Call it on the thread that will run it."""
        device, sizes = self.model.device, self.sizes
        if device.type == "cpu":
            return self._within(memory_of(device, 0), sizes.spare_ranks)
        if sizes.layout.lendable:
            try:
                lends = (sizes.layout.num_pages + 1) * sizes.page_bytes + sizes.pool_bytes
                return self._within(memory_of(device, lends), sizes.spare_ranks)
            except DriverError as error:
                warn_of_fixed_shares(error)
        return self._within(memory_of(device, 0), 0)

    def _within(self, memory: Memory, spare_ranks: int) -> StepRunner[Any, Any, Any]:
        model, sizes, device = self.model, self.sizes, self.model.device
        layout, on_gpu = sizes.layout, device.type == "cuda"
        pool = LoraPool(
            self.shapes,
            capacity_rows=sizes.ranks,
            max_adapters=sizes.max_adapters,
            dtype=model.dtype,
            device=device,
            base=DecoderBaseWeights(model),
            spare_rows=spare_ranks,
            copies=StreamCopies() if on_gpu else None,
            memory=memory,
        )
        # Ranks would have to agree on each step's graph, and on when to give graphs up.
        captures = on_gpu and self.graphs and model.capturable and self.ranks is None
        kv = KVCache(
            model.config.kv_specs,
            layout,
            sizes.kv_dtype,
            device,
            spare=captures,
            memory=memory if self.page_file is None else self.page_file.memory(),
        )
        proposer = self._batch_proposer(kv)
        if self.source is not None:
            self.source.read = lambda pages: kv.read_pages(pages).cpu().numpy()
        graphs = prefill_graphs = None
        if captures:
            side_stream, capture = SideStream() if self.side_stream else None, CudaCapture()
            graphs = DecodeGraphs(model, kv, pool, layout, capture, side_stream)
            prefill_graphs = PrefillGraphs(model, kv, pool, layout, capture, side_stream)
        runner = Runner(model, kv, layout, pool, self.read_adapter, graphs, prefill_graphs, self.tier)
        others = [] if self.ranks is None else self.ranks.build(sizes.of_a_rank)
        if on_gpu:
            warm_up(runner)  # all ranks do, at the same time
        worker = as_one([runner, *others])
        engine = (
            StepEngine(worker, self.retokenizer)
            if self.speculate == "off"
            else SpeculativeStepEngine(worker, self.retokenizer, self._speculator(proposer))
        )
        return engine if model.comm.stages == 1 else PipelinedEngine(engine)

    def _speculator(self, proposer: BatchProposer | None) -> Speculator:
        propose: Propose = expected_text
        answers = None
        if self.speculate != "draft":
            answers = TenantAnswers()
            propose = partial(own_text, answers=answers, same=self.spaceless)
        return Speculator(Measured() if self.speculate == "auto" else Always(), propose, proposer, answers)

    def _batch_proposer(self, kv: KVCache) -> BatchProposer | None:
        """What guesses with a model or a head. From now on the head reads what the served model computes."""
        layout = self.sizes.layout
        if self.draft is None:
            return None
        if isinstance(self.draft, Head):
            kv.reader = states = HeadStates(self.draft, layout)
            return HeadProposer(self.draft, states, layout)
        return DraftModel(self.draft, layout, self.model.config.vocab_size)


def chosen_device(choice: str) -> torch.device:
    """The device of `--device`. Raises LoadError if it is not there."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        raise LoadError("No CUDA device is available; use --device cpu.")
    return torch.device(choice)


def _no_progress(_phase: str, _done: int, _total: int) -> None:
    """Nobody wants to know."""


def _check_quantization(quantize: str | None, device: torch.device) -> None:
    """Raises LoadError for a format that the device does not multiply."""
    if device.type == "cpu":
        return
    if quantize == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise LoadError(
            "--quantize fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper), or a CPU."
        )


def _check_kernels() -> None:
    try:
        check_launcher()
    except DriverError as error:
        raise LoadError(
            f"{error.message} A GPU needs a C compiler (gcc or clang) and Python's headers (python3-dev)."
        ) from error


def _other_ranks(
    options: EngineOptions, checkpoint: Checkpoint, device: torch.device, waits: Callable[[int, int], None]
) -> Ranks | None:
    """Start the processes of the ranks besides this one; None if the model has one. `waits`: see
    `stage_machines.gather`. Raises LoadError for what several ranks cannot do."""
    size, stages, groups = (
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        expert_groups(options),
    )
    attention, halves = attention_ranks(options), two_batches(options)
    if size * stages == 1:
        return None
    option = f"--tensor-parallel-size {size}" if size > 1 else f"--pipeline-parallel-size {stages}"
    library = dist_library(options, device)
    far_away = options.far_stages is not None or options.nnodes > 1
    if far_away and (library is not None or device.type != "cpu"):
        raise LoadError(f"{option} on several nodes works on CPUs with shared memory only so far.")
    if sys.platform == "win32":
        raise LoadError(f"{option} does not work on Windows.")
    if options.draft_model is not None:
        raise LoadError(f"{option} and --draft-model do not work together so far.")
    for name in ("kv_host_bytes", "kv_disk", "kv_remote", "kv_transfer"):
        if getattr(options, name):
            other = f"--{name.replace('_', '-')}"
            raise LoadError(f"{option} and {other} do not work together so far.")
    shared = checkpoint.config().of_rank(0, size, groups, attention_ranks=attention)
    shared.of_stage(0, stages)  # says so before anything is loaded
    if (warning := shared_cores(options)) is not None:
        log.warning("%s", warning)
    if "OMP_NUM_THREADS" not in os.environ:
        here = size if far_away else size * stages
        torch.set_num_threads(max(torch.get_num_threads() // here, 1))
    far = options.far_stages
    if options.nnodes > 1:
        far = gather(options, waits)
    return Ranks(
        options.model,
        size,
        stages,
        groups,
        attention_ranks=attention,
        two_batches=halves,
        dtype=options.dtype,
        quantize=options.quantize,
        max_position=options.max_model_len,
        threads=torch.get_num_threads(),
        far=far,
        device=device,
        library=library,
    )


def _packed_weights(options: EngineOptions, device: torch.device, *, waits: bool) -> PackedWeights | None:
    """Where packed weights are kept; None if they are not. `waits`: see PackedWeights."""
    bound = PACKED_BYTES if options.packed_weights_size is None else options.packed_weights_size
    if device.type != "cpu" or sys.platform != "linux" or not bound:
        return None
    return PackedWeights(cache_folder() / "weights", bound, shared=options.share > 1, waits=waits)


def _loaded(
    options: EngineOptions,
    device: torch.device,
    on_progress: Callable[[int, int], None],
    comm: Comm,
    packed: PackedWeights | None,
    checkpoint: Checkpoint,
) -> Decoder:
    """Load the model to the device. Raises ModelLoadError, or LoadError if there is too little memory."""
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    try:
        return load_model(
            options.model,
            device=device,
            dtype=options.dtype,
            quantize=options.quantize,
            max_position=options.max_model_len,
            on_progress=on_progress,
            comm=comm,
            packed=packed,
            checkpoint=checkpoint,
        )
    except torch.OutOfMemoryError:
        raise LoadError(
            f"The weights of {options.model} do not fit into the {size_text(free)} that are free on the GPU."
        ) from None
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"The system has no memory left for the weights of {options.model}; free some, or use --quantize."
        ) from None


def _cards(
    options: EngineOptions, checkpoint: Checkpoint, adapters: Mapping[str, Adapter], quantization: str | None
) -> dict[str, ModelCard]:
    """The cards of all names that `model` may have, the base's first."""
    base, *_ = names = options.base_names(checkpoint.name)
    if "" in names:
        raise LoadError("--served-model-name is empty.")
    for name in names:
        if name in adapters:
            raise LoadError(
                f"The base model and an adapter are both called {name!r}; use --served-model-name."
            )
    created = checkpoint.created()
    cards = {name: ModelCard(name, None, created, quantization=quantization) for name in names}
    for name, adapter in adapters.items():
        cards[name] = ModelCard(
            name, adapter.digest, created, base, adapter.rank, adapter.traits(), adapter.invocation
        )
    return cards
