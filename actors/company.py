"""The company in two processes, as it serves: Front here, Back in a process of its own.

personae               one_for_one, gives up at once
├── back               starts Back again when it dies, up to its restart intensity
│   └── host           one life of Back's process
└── front              as in `stage.py`

A fault of the device poisons its process and no other, and Back's steps share no interpreter lock with HTTP.
"""

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

from anyio import current_time, to_thread
from msgspec.structs import replace

from personae.actors.front import Front, LocalClient, Prospectus, watching
from personae.actors.host import Host, Progress
from personae.actors.kit.child import Incident, Report, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess, Launch
from personae.actors.stage import MAX_RESTARTS, WITHIN
from personae.actors.wire import Describe, Facts, Port
from personae.engine.config import GenerationDefaults
from personae.engine.tokens import Tokenizer
from personae.errors import BackDied, BackHangs, EngineLost, LoadError, StartFailed
from personae.lora.bounds import AdapterBounds

COMMAND = (sys.executable, "-m", "personae.actors.back")
HANG_SECONDS = 60.0  # a step may have to compile kernels

log = logging.getLogger("personae.actors")


@dataclass(frozen=True, slots=True)
class Company:
    """An engine whose Back is a process of its own."""

    client: LocalClient
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str


@asynccontextmanager
async def open_company(
    options: EngineOptions,
    on_progress: Progress | None = None,
    report: Report = log_incident,
    *,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    command: Sequence[str] = COMMAND,
    max_live: int = 4096,
    window: int = 64,
) -> AsyncIterator[Company]:
    """Start Back, wait until it has loaded, yield the engine; end Back.

    Raises the LoadError that Back refuses its options with, or EngineLost when its process ends or hangs
    while it loads. When Back dies or hangs more than `max_restarts`
    times within a minute it is not started again: streams end with EngineLost, and so does what comes later.
    """
    tokenizer = await to_thread.run_sync(Tokenizer.load, options.model)
    launch = partial(ChildProcess.launch, command)
    async with raise_curtain(
        launch, options, tokenizer, on_progress, report, max_restarts, hang_seconds, max_live, window
    ) as company:
        yield company


@asynccontextmanager
async def raise_curtain(
    launch: Launch,
    options: EngineOptions,
    tokenizer: Tokenizer,
    on_progress: Progress | None = None,
    report: Report = log_incident,
    max_restarts: int = MAX_RESTARTS,
    hang_seconds: float = HANG_SECONDS,
    max_live: int = 4096,
    window: int = 64,
) -> AsyncIterator[Company]:
    """`open_company` when the tokenizer is there and it is known how Back's process is started."""

    met: list[Facts] = []
    fell: float | None = None  # when the life before ended

    def report_unless_raised(incident: Incident) -> None:
        nonlocal fell
        if met and incident.error is not None and fell is None:
            fell = current_time()
        if isinstance(incident.error, BackDied | BackHangs):
            incident.error.__traceback__ = None  # where this process noticed tells nobody anything
        if met or _start_error(incident.error) is None:  # at the start it is raised, and no incident
            report(incident)

    def meet(facts: Facts) -> None:
        nonlocal fell
        if fell is not None:
            streams = len(front.latest.live)
            log.warning("the engine is back after %.1f s; %d answers go on", current_time() - fell, streams)
            fell = None
        met.append(facts)

    watch = watching(report_unless_raised, "personae/back", lambda: front.lose_back())
    root = Supervisor("personae", max_restarts=0, report=watch)
    # Temporary: when it gives up, Front stays, to tell everybody.
    back = root.supervisor("back", max_restarts=max_restarts, within=WITHIN, restart="temporary")
    port = Port("back")
    front = Front(root, ready=lambda: port.is_open, max_live=max_live, window=window)
    front.meet(port, port)
    front.describe_back = lambda: port.tell(Describe())
    lives = count(1)

    def host() -> Host:
        progress = None if met else on_progress
        plain = replace(options, secret=None)  # Back has no use for it
        return Host(launch, plain, next(lives), port, front, meet, progress, hang_seconds)

    back.spawn("host", host)
    try:
        async with root:
            facts = met[0]
            prospectus = Prospectus(
                tokenizer,
                facts.models,
                facts.max_model_len,
                facts.vocab_size,
                options.salts(),
            )
            client = LocalClient(prospectus, front)
            yield Company(client, facts.defaults, facts.max_adapters, facts.bounds, facts.about)
    except StartFailed as failure:
        raise (_start_error(failure) or failure) from failure.__cause__


def _start_error(error: BaseException | None) -> LoadError | EngineLost | None:
    """What is said of a start that failed: the LoadError behind an error, or how Back's process ended."""
    while error is not None and not isinstance(error, LoadError):
        if isinstance(error, BackDied | BackHangs):
            return EngineLost(error.message)
        error = error.__cause__
    return error
