"""Several engines on one machine, each in a process of its own, behind one frontend.

personae               one_for_one, gives up at once
├── dispatcher         decides who goes next, and where
├── scaler             adds and removes replicas
├── load-scaler        with --replicas MIN:MAX: says how many
├── role-chooser       with --prefill-replicas auto: says how many only compute prompts
├── engine-0/frontend  as in `in_process.py`
├── engine-0/core      restarts the engine core when it dies, within its restart intensity
│   └── process        one epoch of the engine core's process
└── engine-1/...

Each engine has a share of the processor's cores, or a GPU of its own.
"""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from anyio import to_thread

from personae.actors.frontend.engine_process import Progress
from personae.actors.frontend.supervised_engine import MAX_RESTARTS, SupervisedEngine, start_error
from personae.actors.keeping import Keeper, local_launches
from personae.actors.kit.child import Incident, ReportIncident, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.multi_process import (
    HANG_SECONDS,
    MultiProcessEngine,
    multi_process_engine,
)
from personae.actors.options import EngineOptions, PrefillReplicas
from personae.actors.process import Launch
from personae.actors.replicas.load_scaling import LoadScaler, ScalingPolicy
from personae.actors.replicas.placement.base import Placement
from personae.actors.replicas.placement.estimated import EstimatedSeconds
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.replicas.roles import RoleChooser, RolePolicy
from personae.actors.replicas.scaling import HearKVEvents, ReplicaScaler
from personae.actors.replicas.source import LocalSource, ReplicaSource
from personae.actors.spawn import COMMAND
from personae.engine.scheduling.background import TieredPolicy
from personae.engine.scheduling.fairness import FairnessPolicy, VirtualTokenCounters
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError, StartFailed
from personae.kernels.cgroup import usable_cores
from personae.kernels.devices import cuda_devices, visible_devices

SILENCE_SECONDS = 3.0  # how long an engine core may be silent before its streams move
MAX_LIVE = 4096  # sequences per replica


@asynccontextmanager
async def open_replicas(
    options: EngineOptions,
    count: int,
    on_progress: Progress | None = None,
    report: ReportIncident = log_incident,
    *,
    most: int | None = None,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    command: Sequence[str] = COMMAND,
    max_live: int | None = None,
    window: int = 64,
    on_kv_events: HearKVEvents | None = None,
    keeper: Keeper | None = None,
    prefill: PrefillReplicas = 0,
    by_load: bool = False,
) -> AsyncIterator[MultiProcessEngine]:
    """Do what `open_multi_process` does with `count` engines, and with up to `most` after scaling. An engine
    that dies, or is silent for `silence_seconds`, loses its streams to the others. With `prefill`, so many of
    the engines only compute prompts; with "auto" the load decides how many. `by_load`: the load decides how
    many there are, from `count` to `most`. With a `count` of 0 one starts, which shows that the model loads,
    and none is left when nobody asks.

    Raises LoadError if no engine would be left for the answers.
    """
    if options.kv_transfer and sys.platform == "win32":
        raise LoadError("--kv-transfer and --prefill-replicas do not work on Windows.")
    tokenizer = await to_thread.run_sync(Tokenizer.load, options.model)
    most = max(most or count, count)
    options = replace(options, share=most)
    async with (
        _page_folder(options) as page_folder,
        local_launches(command, shares(options, most), options, keeper, max(count, 1)) as launches,
        launch_replicas(
            LocalSource(launches),
            count,
            options,
            tokenizer,
            on_progress,
            report,
            max_restarts=max_restarts,
            hang_seconds=hang_seconds,
            silence_seconds=silence_seconds,
            max_live=max_live or MAX_LIVE * most,
            window=window,
            on_kv_events=on_kv_events,
            prefill=prefill,
            page_folder=page_folder,
            by_load=by_load,
        ) as engines,
    ):
        yield engines


def check_prefill(prefill: PrefillReplicas, least: int, most: int) -> None:
    """Raises LoadError if `least` engines have none left for the answers when `prefill` of them only compute
    prompts, or if `most` engines leave nothing to decide."""
    if prefill == "auto":
        if most < 2:
            raise LoadError("--prefill-replicas auto needs --replicas of 2 or more.")
    elif prefill and prefill >= least:
        raise LoadError(f"--prefill-replicas {prefill} leaves no engine of --replicas {least} for answers.")


@asynccontextmanager
async def _page_folder(options: EngineOptions) -> AsyncIterator[Path | None]:
    """A folder of this user's for the sockets where engines give pages to one another."""
    if not options.kv_transfer:
        yield None
        return
    with TemporaryDirectory(prefix="personae-") as folder:
        yield Path(folder)


def shares(options: EngineOptions, count: int) -> list[dict[str, str]]:
    """Return the environment of each engine's process: its GPUs, one for each of its ranks, or its number of
    threads. Raises LoadError if there are fewer GPUs than that."""
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    on_gpu = options.device == "cuda" or (options.device == "auto" and cuda_devices() > 0)
    if on_gpu:
        devices = visible_devices()
        if len(devices) < count * ranks:
            raise LoadError(f"--replicas {count} needs {count * ranks} GPUs; there are {len(devices)}.")
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(devices[number * ranks : (number + 1) * ranks])}
            for number in range(count)
        ]
    if "OMP_NUM_THREADS" in os.environ:
        return [{}] * count
    threads = max(int(usable_cores() / count / ranks), 1)
    return [{"OMP_NUM_THREADS": str(threads)}] * count


@asynccontextmanager
async def launch_replicas(
    source: ReplicaSource,
    count: int,
    options: EngineOptions,
    tokenizer: Tokenizer,
    on_progress: Progress | None = None,
    report: ReportIncident = log_incident,
    *,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    max_live: int = MAX_LIVE,
    window: int = 64,
    placement: Placement | None = None,
    policy: FairnessPolicy | None = None,
    on_kv_events: HearKVEvents | None = None,
    prefill: PrefillReplicas = 0,
    page_folder: Path | None = None,
    by_load: bool = False,
) -> AsyncIterator[MultiProcessEngine]:
    """Do what `open_replicas` does, with a given source of processes. The first engine starts alone: options
    that it refuses, all would refuse. Raises LoadError if prefill engines would leave none for the answers.
    """
    first = max(count, 1)
    check_prefill(prefill, count, source.most)

    def make_engine(index: int, launch: Launch) -> SupervisedEngine:
        return SupervisedEngine(
            launch,
            replace(options, page_socket=replicas.page_socket(index)),
            None if index else on_progress,
            max_restarts,
            hang_seconds,
            min(silence_seconds, hang_seconds),
            f"engine-{index}",
        )

    def note(incident: Incident) -> None:
        if scaler.notes(incident):
            report(incident)

    root = Supervisor("personae", max_restarts=0, report=note)
    replicas = ReplicaSet(
        root,
        placement or EstimatedSeconds(),
        policy or TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters()),
        max_live=max_live,
        window=window,
        prefill=0 if prefill == "auto" else prefill,
        page_folder=page_folder,
        wakes=not count,
    )
    on_events = on_kv_events if options.record_kv_events else None
    scaler = ReplicaScaler(root, replicas, source, make_engine, on_events)
    engines = [scaler.add()[1] for _ in range(first)]
    scaler.start(engines[0])
    if by_load:
        root.spawn("load-scaler", lambda: LoadScaler(replicas, scaler, ScalingPolicy(count, source.most)))
    if prefill == "auto":
        root.spawn("role-chooser", lambda: RoleChooser(replicas, RolePolicy()))
    try:
        async with root:
            for engine in engines[1:]:
                scaler.start(engine)
            for engine in engines[1:]:
                await engine.loaded()
            scaler.max_model_len = min(engine.facts.max_model_len for engine in engines)
            facts = engines[0].facts
            engine_processes = multi_process_engine(facts, scaler.max_model_len, tokenizer, options, replicas)
            yield replace(engine_processes, scaler=scaler)
    except StartFailed as failure:
        raise (start_error(failure) or failure) from failure.__cause__
