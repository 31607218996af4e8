"""The engine in two processes, as it serves: the frontend here, the engine core in a process of its own.

personae               one_for_one, gives up at once
├── back               starts the engine core again when it dies, up to its restart intensity
│   └── host           one epoch of the engine core's process
└── front              as in `stage.py`

A fault of the device poisons its process and no other, and the engine core's steps share no interpreter lock
with HTTP.
"""

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from anyio import current_time, to_thread

from personae.actors.frontend.engine_process import EngineProcess, Progress
from personae.actors.frontend.frontend import Frontend, LocalClient, ModelInfo, watch_restarts
from personae.actors.in_process import MAX_RESTARTS, WITHIN
from personae.actors.kit.child import Incident, Report, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess, Launch
from personae.actors.wire import Describe, Facts, Port
from personae.engine.config import GenerationDefaults
from personae.engine.tokens import Tokenizer
from personae.errors import EngineCoreDied, EngineCoreHangs, EngineLost, LoadError, StartFailed
from personae.lora.bounds import AdapterBounds

COMMAND = (sys.executable, "-m", "personae.actors.enginecore.core")
HANG_SECONDS = 60.0  # a step may have to compile kernels

log = logging.getLogger("personae.actors")


@dataclass(frozen=True, slots=True)
class MultiProcessEngine:
    """An engine whose the engine core is a process of its own."""

    client: LocalClient
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str


@asynccontextmanager
async def open_multi_process(
    options: EngineOptions,
    on_progress: Progress | None = None,
    report: Report = log_incident,
    *,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    command: Sequence[str] = COMMAND,
    max_live: int = 4096,
    window: int = 64,
) -> AsyncIterator[MultiProcessEngine]:
    """Start the engine core, wait until it has loaded, yield the engine; end the engine core.

    Raises the LoadError that the engine core refuses its options with, or EngineLost when its process ends or
    hangs while it loads. When the engine core dies or hangs more than `max_restarts` times within a minute it
    is not started again: streams end with EngineLost, and so does what comes later.
    """
    tokenizer = await to_thread.run_sync(Tokenizer.load, options.model)
    launch = partial(ChildProcess.launch, command)
    async with launch_processes(
        launch, options, tokenizer, on_progress, report, max_restarts, hang_seconds, max_live, window
    ) as engine_processes:
        yield engine_processes


@asynccontextmanager
async def launch_processes(
    launch: Launch,
    options: EngineOptions,
    tokenizer: Tokenizer,
    on_progress: Progress | None = None,
    report: Report = log_incident,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    max_live: int = 4096,
    window: int = 64,
) -> AsyncIterator[MultiProcessEngine]:
    """`open_multi_process` when the tokenizer is there and it is known how the engine core's process is
    started."""

    connected: list[Facts] = []
    died_at: float | None = None  # when the life before ended

    def report_unless_raised(incident: Incident) -> None:
        nonlocal died_at
        if connected and incident.error is not None and died_at is None:
            died_at = current_time()
        if isinstance(incident.error, EngineCoreDied | EngineCoreHangs):
            incident.error.__traceback__ = None  # where this process noticed tells nobody anything
        if connected or _start_error(incident.error) is None:  # at the start it is raised, and no incident
            report(incident)

    def connect(facts: Facts) -> None:
        nonlocal died_at
        if died_at is not None:
            streams = len(frontend.latest.live)
            log.warning(
                "the engine is back after %.1f s; %d answers go on", current_time() - died_at, streams
            )
            died_at = None
        connected.append(facts)

    watch = watch_restarts(report_unless_raised, "personae/back", lambda: frontend.lose_engine())
    root = Supervisor("personae", max_restarts=0, report=watch)
    # Temporary: when it gives up, the frontend stays, to tell everybody.
    core = root.supervisor("back", max_restarts=max_restarts, within=WITHIN, restart="temporary")
    port = Port("back")
    frontend = Frontend(root, ready=lambda: port.is_open, max_live=max_live, window=window)
    frontend.connect(port, port)
    frontend.describe_core = lambda: port.tell(Describe())
    epochs = count(1)

    def host() -> EngineProcess:
        progress = None if connected else on_progress
        plain = replace(options, secret=None)  # The engine core has no use for it
        return EngineProcess(launch, plain, next(epochs), port, frontend, connect, progress, hang_seconds)

    core.spawn("host", host)
    try:
        async with root:
            facts = connected[0]
            model_info = ModelInfo(
                tokenizer,
                facts.models,
                facts.max_model_len,
                facts.vocab_size,
                options.salts(),
            )
            client = LocalClient(model_info, frontend)
            yield MultiProcessEngine(client, facts.defaults, facts.max_adapters, facts.bounds, facts.about)
    except StartFailed as failure:
        raise (_start_error(failure) or failure) from failure.__cause__


def _start_error(error: BaseException | None) -> LoadError | EngineLost | None:
    """What is said of a start that failed: the LoadError behind an error, or how the engine core's process
    ended."""
    while error is not None and not isinstance(error, LoadError):
        if isinstance(error, EngineCoreDied | EngineCoreHangs):
            return EngineLost(error.message)
        error = error.__cause__
    return error
