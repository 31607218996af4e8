"""The engine in two processes, as in production: the frontend here, the engine core in a process of its own.

personae               one_for_one, gives up at once
├── core               restarts the engine core when it dies, within its restart intensity
│   └── process        one epoch of the engine core's process
└── frontend           as in `in_process.py`

A device fault damages only the engine core's process, and the engine core's steps do not share an interpreter
lock with HTTP.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from anyio import create_task_group, sleep, to_thread

from personae.actors.framing import frame
from personae.actors.frontend.engine_process import Progress
from personae.actors.frontend.frontend import Frontend, LocalClient, ModelInfo, Serving
from personae.actors.frontend.supervised_engine import MAX_RESTARTS, SupervisedEngine, start_error
from personae.actors.keeping import Keeper, local_launches
from personae.actors.kit.child import Incident, ReportIncident, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.options import EngineOptions
from personae.actors.page_file import held_page_file
from personae.actors.process import Launch
from personae.actors.spawn import COMMAND, end_ahead, have_spare
from personae.actors.wire import Facts, StandBy
from personae.engine.generation_config import GenerationDefaults
from personae.engine.tokens import Tokenizer
from personae.errors import StartFailed
from personae.grammar.vocabulary import check_vocabulary
from personae.lora.bounds import AdapterBounds

if TYPE_CHECKING:
    from personae.actors.replicas.scaling import HearKVEvents, ReplicaScaler

SPARE_SECONDS = 1.0  # between two looks whether there is a spare process
HANG_SECONDS = 60.0  # long, since a step may have to compile kernels


@dataclass(frozen=True, slots=True)
class MultiProcessEngine:
    """An engine whose core is a process of its own. With replicas, `scaler` adds and removes them."""

    client: LocalClient
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str
    scaler: "ReplicaScaler | None" = None


@asynccontextmanager
async def open_multi_process(
    options: EngineOptions,
    on_progress: Progress | None = None,
    report: ReportIncident = log_incident,
    *,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    command: Sequence[str] = COMMAND,
    max_live: int = 4096,
    window: int = 64,
    on_kv_events: "HearKVEvents | None" = None,
    keeper: Keeper | None = None,
    spare: bool = False,
) -> AsyncIterator[MultiProcessEngine]:
    """Start the engine core, wait until it has loaded, and yield the engine. On exit, end the engine core.
    With a `keeper` it outlives this process if that is killed, or is one that outlived another process. With
    `spare`, another process loads the same ahead and takes over when the engine core dies, with its KV cache
    where that can outlive it.

    Raises the LoadError with which the engine core refuses its options, or EngineLost if its process ends or
    hangs while it loads. If the engine core dies or hangs more than `max_restarts` times within a minute, it
    is not started again: streams end with EngineLost, and later requests are refused with it.
    """
    tokenizer = await to_thread.run_sync(Tokenizer.load, options.model)
    async with (
        local_launches(command, [{}], options, keeper, 1) as (launch,),
        AsyncExitStack() as stack,
    ):
        if spare and sys.platform == "linux":
            held = stack.enter_context(held_page_file())
            launch, options = held.launch(launch), replace(options, page_file=held.path)
        engine_processes = await stack.enter_async_context(
            launch_processes(
                launch,
                options,
                tokenizer,
                on_progress,
                report,
                max_restarts,
                hang_seconds,
                max_live,
                window,
                on_kv_events,
            )
        )
        if spare:
            await stack.enter_async_context(_spare_process(command, options, engine_processes.client))
        yield engine_processes


@asynccontextmanager
async def _spare_process(
    command: Sequence[str], options: EngineOptions, client: LocalClient
) -> AsyncIterator[None]:
    """While the engine serves, have a process that replaces it sooner. It begins only then: loading takes a
    processor's time, which a start needs more."""
    stand_by = frame(StandBy(replace(options, secret=None)))

    async def keep() -> None:
        while True:
            if client.stats().ready:
                have_spare(stand_by, command)
            await sleep(SPARE_SECONDS)

    async with create_task_group() as tasks:
        tasks.start_soon(keep)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            end_ahead()


@asynccontextmanager
async def launch_processes(
    launch: Launch,
    options: EngineOptions,
    tokenizer: Tokenizer,
    on_progress: Progress | None = None,
    report: ReportIncident = log_incident,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    max_live: int = 4096,
    window: int = 64,
    on_kv_events: "HearKVEvents | None" = None,
) -> AsyncIterator[MultiProcessEngine]:
    """Do what `open_multi_process` does, with a given tokenizer and a given way to start the engine core's
    process."""
    engine = SupervisedEngine(launch, options, on_progress, max_restarts, hang_seconds)

    def note(incident: Incident) -> None:
        if engine.notes(incident):
            report(incident)

    root = Supervisor("personae", max_restarts=0, report=note)
    engine.add_to(root)
    frontend = Frontend(root, ready=lambda: engine.port.is_open, max_live=max_live, window=window)
    engine.serve(frontend)
    if on_kv_events is not None:
        frontend.on_kv_events = partial(on_kv_events, 0)
    try:
        async with root:
            facts = engine.facts
            yield multi_process_engine(facts, facts.max_model_len, tokenizer, options, frontend)
    except StartFailed as failure:
        raise (start_error(failure) or failure) from failure.__cause__


def multi_process_engine(
    facts: Facts, max_model_len: int, tokenizer: Tokenizer, options: EngineOptions, frontend: Serving
) -> MultiProcessEngine:
    """Build the engine from the facts of the loaded model. Raises ModelLoadError if no grammar could bind its
    answers. The engine core reads the vocabulary later."""
    check_vocabulary(tokenizer.decoder, facts.vocab_size, tokenizer.eos_ids)
    model_info = ModelInfo(tokenizer, facts.models, max_model_len, facts.vocab_size, options.salts())
    client = LocalClient(model_info, frontend)
    return MultiProcessEngine(client, facts.defaults, facts.max_adapters, facts.bounds, facts.about)
